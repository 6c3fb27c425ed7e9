"""Machine code that LLVM makes through llvmlite, from its own language, for this machine's
processor: made when it is first asked for, then kept on disk.

Owns that code's memory. Needs llvmlite, which the extra `cpu` brings.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from saccade.kernels.x86.jit_cache import code_folder

Function = Callable[[int], None]
"""Takes the address of a call, of which it changes the first number."""


def compiled(
    names: Sequence[str], assembly: Callable[[str], str], sources: str
) -> Mapping[str, Function]:
    """Compile assembly(the kind of machine) with LLVM, and return the functions with these names.

    The assembly must depend on `sources` alone.
    """
    import llvmlite
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    # LLVM would rather have halves of 512 bits on some processors.
    features = f"{binding.get_host_cpu_features().flatten()},-prefer-256-bit"
    processor = binding.get_host_cpu_name()
    triple = binding.get_process_triple()
    target = binding.Target.from_triple(triple)
    machine = target.create_target_machine(processor, features, opt=3, jit=True)

    def make() -> bytes:
        module = binding.parse_assembly(assembly(triple))
        module.verify()
        made: bytes = machine.emit_object(module)
        return made

    said = (llvmlite.__version__, triple, processor, features, source_text(__file__), sources)
    code = _kept("\n".join(said), make)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    found = {name: kind(engine.get_function_address(name)) for name in names}
    _ENGINES.append(engine)
    return found


_ENGINES: list[Any] = []
"""What holds the code's memory: as long as the process."""


def source_text(source: Any) -> str:
    """Return the text of a module's source, or of a path."""
    return Path(source if isinstance(source, str) else source.__file__).read_text()


def _kept(what: str, make: Callable[[], bytes]) -> bytes:
    """Return the code made from `what` before; or make it now and keep it."""
    folder = code_folder("code")
    if folder is None:
        return make()
    path = folder / f"{hashlib.sha256(what.encode()).hexdigest()}.o"
    with suppress(OSError):
        return path.read_bytes()
    code = make()
    with suppress(OSError):  # without room every process makes its own
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    return code
