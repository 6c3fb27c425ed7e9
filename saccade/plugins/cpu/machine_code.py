"""Compiles LLVM IR for the host CPU through llvmlite, and links object files.

Code is compiled at first use and then cached on disk. Loading cached code does not import llvmlite.
Compiling needs llvmlite, which the extra `cpu` installs.
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
"""A compiled function. It takes the address of its arguments, and changes the first one, the
counter of claimed work blocks.
"""


def compiled(
    names: Sequence[str], code: str, agreed: Sequence[str] = (), *arguments: object
) -> Mapping[str, Function]:
    """Compile the LLVM IR that a module generates, and return the functions with these names.

    code: a module of this package. Its `assembly(target triple, *arguments)` returns the IR. It is
        imported only to compile, because it may import llvmlite.
    agreed: other modules that the IR depends on: names within this package, or full names. If their
        source changes, the code is compiled again.
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
    """Load an object file, and return its functions with these names."""
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
    """Return a cache key for the compiler and the host CPU, without importing the compiler."""
    return "\n".join((version("llvmlite"), platform.machine(), cpu_info.describe(), OMITTED))


def _machine() -> Any:
    """Return a new LLVM target machine for the host. An execution engine will own it."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    features = f"{binding.get_host_cpu_features().flatten()},{OMITTED}"
    return target.create_target_machine(binding.get_host_cpu_name(), features, opt=3, jit=True)


OMITTED = "-prefer-256-bit"
"""CPU feature to disable: it makes LLVM split 512-bit vectors in halves on some CPUs."""
_ENGINES: list[Any] = []
"""Execution engines, which own the memory of the code that they have linked. They are never
released.
"""


def _source_text(name: str) -> str:
    """Return a module's source without importing the module, which may import a compiler."""
    found = find_spec(name if "." in name else f"{__package__}.{name}")
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text()
