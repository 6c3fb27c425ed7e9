"""Machine code that LLVM makes through llvmlite, from its own language, for this machine's
processor: made when it is first asked for, then kept on disk.

Owns that code's memory. Needs llvmlite, which the extra `cpu` brings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from saccade.kernels.x86 import kept_files

Function = Callable[[int], None]
"""Takes the address of a call, of which it changes the first number."""


def compiled(
    names: Sequence[str], assembly: Callable[[str], str], sources: str
) -> Mapping[str, Function]:
    """Compile assembly(the kind of machine) with LLVM, and return the functions with these names.

    The assembly must depend on `sources` alone.
    """

    def make() -> bytes:
        from llvmlite import binding

        module = binding.parse_assembly(assembly(binding.get_process_triple()))
        module.verify()
        made: bytes = _machine().emit_object(module)
        return made

    words = "\n".join((describe_target(), source_text(__file__), sources))
    return link(kept_files.kept(words, make), names)


def link(code: bytes, names: Sequence[str]) -> Mapping[str, Function]:
    """Return the functions with these names from an object file."""
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    found = {name: kind(engine.get_function_address(name)) for name in names}
    _ENGINES.append(engine)
    return found


@cache
def describe_target() -> str:
    """Return the words that say which compiler and processor code is for."""
    import llvmlite
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple, processor = binding.get_process_triple(), binding.get_host_cpu_name()
    return "\n".join((llvmlite.__version__, triple, processor, _features()))


def _features() -> str:
    from llvmlite import binding

    # LLVM would rather have halves of 512 bits on some processors.
    return f"{binding.get_host_cpu_features().flatten()},-prefer-256-bit"


def _machine() -> Any:
    """Return LLVM's view of this machine, a new one: an engine takes it over."""
    from llvmlite import binding

    describe_target()
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(binding.get_host_cpu_name(), _features(), opt=3, jit=True)


_ENGINES: list[Any] = []
"""What holds the code's memory: as long as the process."""


def source_text(source: Any) -> str:
    """Return the text of a module's source, or of a path."""
    return Path(source if isinstance(source, str) else source.__file__).read_text()
