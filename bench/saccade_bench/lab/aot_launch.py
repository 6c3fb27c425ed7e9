"""`python -m saccade_bench.lab.aot_launch`: launch every Triton kernel without a GPU, through
Triton's own JIT: binder, compiler, ptxas and launcher. Only libcuda is replaced by a stub
(`aot_cuda.c`).

Unlike the interpreter and `aot.py`, this detects arguments that the binder or the launcher rejects,
empty grids, and grids and shared memory beyond a GPU's limits. Kernels are not executed: the
interpreter tests their results.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from saccade.kernels import device
from saccade_bench.lab.aot import PROMISED, SHARED

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("aot_cuda.c")
NOTES = ROOT / "build" / "launched"
"""Marker files of successful runs, named by the hash of everything that launches depend on."""


def lacking() -> str | None:
    """Return the reason why kernels cannot be launched on this machine, or None if they can."""
    if shutil.which("gcc") is None:
        return "gcc is not installed: it makes the stand-in for libcuda and Triton's launcher"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python.h is not installed: Triton's launcher is compiled with it"
    return None


@dataclass(frozen=True, slots=True)
class StubDevice:
    """Counters of the stub's calls."""

    library: ctypes.CDLL

    @property
    def launches(self) -> int:
        return ctypes.c_long.in_dll(self.library, "stub_launches").value

    @property
    def programs(self) -> int:
        return ctypes.c_long.in_dll(self.library, "stub_programs").value


class StubDriver(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's own driver, which uses the stub instead of libcuda, and does not need torch.cuda."""

    def __init__(self, arch: int) -> None:
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher
        self._arch = arch
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _: 0
        self.get_device_capability = lambda _: divmod(arch, 10)
        self.set_current_device = lambda _: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return SimpleNamespace(current_device=lambda: 0)


@contextmanager
def stubbed(arch: int = PROMISED) -> Iterator[StubDevice]:
    """Launch kernels on a stub GPU of that architecture within the context.

    It can only be used once per process, because neither Triton nor the loader unloads a libcuda.
    """
    folder = Path(tempfile.mkdtemp(prefix="saccade-libcuda-"))
    try:
        library = folder / "libcuda.so.1"
        headers = Path(nvidia.__file__).parent / "include"
        command = ["gcc", "-shared", "-fPIC", "-Wno-attribute-alias", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, f"-I{headers}", SOURCE, "-o", library], check=True)
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        ctypes.c_int.in_dll(loaded, "stub_arch").value = arch
        ctypes.c_int.in_dll(loaded, "stub_shared").value = SHARED[arch]
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        driver.set_active(StubDriver(arch))
        with patch.object(device, "generation", lambda _: arch):
            yield StubDevice(loaded)
    finally:
        shutil.rmtree(folder)


def digest_of(folders: Sequence[str], *said: object) -> str:
    """Hash the Python and C files in folders of the repository, Triton's version, and `said`."""
    found = hashlib.sha256(repr((triton.__version__, torch.__version__, *said)).encode())
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.[pc]*")):
            if path.suffix in (".py", ".c"):
                found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:32]


def once(digest: str, work: Callable[[], list[str]]) -> int:
    """Do `work` and print the failures that it returns, unless it succeeded before with the same
    digest. Returns the exit status.
    """
    if (why := lacking()) is not None:
        print(f"no kernel is launched: {why}")
        return 0
    note = NOTES / digest
    if note.exists():
        print(note.read_text(), end="")
        return 0
    begun = time.process_time()
    complaints = work()
    for each in complaints:
        print(each)
    if complaints:
        return 1
    print(f"({time.process_time() - begun:.0f} s of CPU time)")
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text("every kernel was launched before, and nothing has changed since\n")
    return 0


def launch_cases(arch: int, only: str = "") -> list[str]:
    """Launch every case of `aot_cases.py`. Returns the failures."""
    from saccade_bench.lab.aot_cases import cases  # imports Triton, which `main` prepares for

    bad = []
    with stubbed(arch) as stub:
        chosen = [each for each in cases() if only in each.name and arch >= each.least_arch]
        for case in chosen:
            try:
                case.run()
            except Exception as error:  # any exception of Triton or the launcher is a failure
                bad.append(f"sm_{arch} {case.name}: {type(error).__name__}: {str(error)[:400]}")
        print(f"sm_{arch}: {stub.launches} launches of {len(chosen)} cases, {len(bad)} failed")
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit status is 1 if a launch fails."""
    parser = argparse.ArgumentParser(
        prog="python -m saccade_bench.lab.aot_launch", description=__doc__
    )
    parser.add_argument("--arch", type=int, default=PROMISED, choices=sorted(SHARED))
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args(argv)
    # Triton 3.9 has the same default, but warns if the variable is unset.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    digest = digest_of(["saccade/kernels", "bench/saccade_bench/lab"], args.arch, args.only)
    return once(digest, lambda: launch_cases(args.arch, args.only))


if __name__ == "__main__":
    sys.exit(main())
