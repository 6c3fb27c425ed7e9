"""Machine code that LLVM makes through llvmlite, from its own language, for this machine's
processor: made when it is first asked for, then kept on disk, from where no LLVM is needed.

Needs llvmlite to make it, which the extra `cpu` brings.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from saccade.plugins.cpu import cpu_info, disk_cache
from saccade.plugins.cpu.object_code import NotLoadable, load_code

Function = Callable[[int], None]
"""Takes the address of a call, of which it changes the first number."""


def compiled(
    names: Sequence[str], code: str, agreed: Sequence[str] = (), *arguments: object
) -> Mapping[str, Function]:
    """Compile assembly(the kind of machine, *arguments) of the file `code` with LLVM. Returns the
    functions with these names.

    agreed: other modules that the assembly depends on, beside this one or by their whole names. The
    file is imported only to compile: it may bring llvmlite.
    """

    def make() -> bytes:
        from llvmlite import binding

        instructions = import_module(f"{__package__}.{code}")
        text = instructions.assembly(binding.get_process_triple(), *arguments)
        module = binding.parse_assembly(text)
        module.verify()
        made: bytes = _machine().emit_object(module)
        return made

    texts = map(_source_text, ("machine_code", code, *agreed))
    words = "\n".join((describe_target(), repr((names, arguments)), *texts))
    return link(disk_cache.get_or_create(words, make), names)


def link(code: bytes, names: Sequence[str]) -> Mapping[str, Function]:
    """Return the functions with these names from an object file."""
    try:
        addresses = load_code(code, names)
    except NotLoadable:
        addresses = _link_by_llvm(code, names)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    return {name: kind(address) for name, address in addresses.items()}


def _link_by_llvm(code: bytes, names: Sequence[str]) -> dict[str, int]:
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return {name: engine.get_function_address(name) for name in names}


@cache
def describe_target() -> str:
    """Return a key for the compiler and CPU that code is for, without running the compiler."""
    return "\n".join((version("llvmlite"), platform.machine(), cpu_info.describe(), OMITTED))


def _machine() -> Any:
    """Return LLVM's view of this machine, a new one: an engine takes it over."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    features = f"{binding.get_host_cpu_features().flatten()},{OMITTED}"
    return target.create_target_machine(binding.get_host_cpu_name(), features, opt=3, jit=True)


OMITTED = "-prefer-256-bit"
"""LLVM would rather have halves of 512 bits on some processors."""
_ENGINES: list[Any] = []
"""What holds the memory of code that LLVM has linked: as long as the process."""


def _source_text(name: str) -> str:
    """Return a module's text. It is not imported: it may need a compiler."""
    found = find_spec(name if "." in name else f"{__package__}.{name}")
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text()
