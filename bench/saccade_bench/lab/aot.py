"""`python -m saccade_bench.lab.aot`: compile every Triton kernel ahead of time without a GPU, and
inspect the result: registers, spills, shared memory, tensor core instructions, access widths.
A launch that is recorded with the same source is not compiled again unless `--all` is passed.

Each kernel's host code is called with tensors on the CPU, while a recorder replaces its
`JITFunction`. The recorded launches (types, divisibility by 16, constants) are then compiled by
Triton's ptxas. `aot_cases.py` lists the calls.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from saccade.kernels import device
from saccade_bench.lab.aot_case import KernelCase, Promise

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bool: "i1",
}
PRODUCT = re.compile(r"\b(HGMMA|HMMA|UTCHMMA|UTCOMMA)\b")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RECORD = Path("bench/results/aot")
"""Directory of the committed results, with a file per architecture and version of Triton."""
MORE_REGISTERS = 1.15
"""Maximum factor by which registers, shared memory or spills may exceed the recorded values."""
PROMISED = 90
"""The architecture that tile sizes were tuned for."""
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Maximum bytes of shared memory per launch, by architecture (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability").
"""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One recorded launch."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    attributes: Mapping[tuple[int, ...], list[list[object]]]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def source(self) -> ASTSource:
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)

    @property
    def digest(self) -> str:
        """Hash of everything that the machine code depends on, except for Triton's version and the
        architecture: the source of the kernel and of its device functions with its line number,
        types, constants and options.
        """
        said = self.source.hash() + repr(sorted(self.options.items()))
        return hashlib.sha256(said.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The compiled code of one launch. `loads` and `stores` are the bytes per thread of the widest
    accesses to global memory in PTX.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    warps: int
    loads: int
    stores: int
    products: tuple[str, ...]
    slow_conversions: int = 0  # unpacked conversions to bfloat16 in a loop with matrix products


class Recorder:
    """Replaces a JITFunction: launches are recorded instead of run."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[KernelLaunch] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        names = self.kernel.arg_names
        bound = dict(zip(names, args)) | {k: v for k, v in kwargs.items() if k in names}
        signature, constants = dict[str, str](), dict[str, Any]()
        attributes: dict[tuple[int, ...], list[list[object]]] = {}
        for at, (name, param) in enumerate(zip(names, self.kernel.params, strict=True)):
            value = bound[name]
            if param.is_constexpr or value is None:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                if value.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment:
                    attributes[(at,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1 and not param.do_not_specialize:  # as the JIT does
                signature[name], constants[name] = "constexpr", 1
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not param.do_not_specialize:
                    attributes[(at,)] = [["tt.divisibility", 16]]
        options = {k: v for k, v in kwargs.items() if k not in names}
        self.launches.append(KernelLaunch(self.kernel, signature, constants, attributes, options))


@contextmanager
def recorded(module: ModuleType) -> Iterator[list[Recorder]]:
    """Replace a module's kernels by recorders within the context, and yield these."""
    kernels = {name: each for name, each in vars(module).items() if isinstance(each, JITFunction)}
    recorders = {name: Recorder(kernel) for name, kernel in kernels.items()}
    try:
        for name, recorder in recorders.items():
            setattr(module, name, recorder)
        yield list(recorders.values())
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def launched_kernels(source: str) -> set[str]:
    """Return the names of the kernels that a module's source launches, which are the functions
    under `triton.jit` that are subscripted with a grid. All others are device functions.
    """
    tree = ast.parse(source)
    compiled = {
        each.name
        for each in tree.body
        if isinstance(each, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(how) for how in each.decorator_list)
    }
    launched = {
        call.func.value.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Subscript)
        and isinstance(call.func.value, ast.Name)
    }
    return launched & compiled


def launches_of(case: KernelCase, arch: int = PROMISED) -> list[KernelLaunch]:
    """Return a case's launches, as the host would make them on a GPU of that architecture."""
    with recorded(case.module) as recorders, patch.object(device, "generation", lambda _: arch):
        case.run()
    return [launch for recorder in recorders for launch in recorder.launches]


def _widest(ptx: str, what: str) -> int:
    """Return the bytes of the widest access to global memory, or 0 if there is none."""
    found = [0]
    for vector, bits in re.findall(rf"{what}\.global[.\w:]*?(?:\.v(\d))?\.[busf](\d+)\b", ptx):
        found.append(int(vector or 1) * int(bits) // 8)
    if what == "ld":  # asynchronous copies to shared memory, which bypass registers
        found += [int(n) for n in re.findall(r"cp\.async\.c[ga]\.shared\.global[^;]*?, (\d+)", ptx)]
        found += [int(n, 16) for n in re.findall(r"cp\.async[^;]*?, 0x([0-9a-f]+)", ptx)]
    return max(found)


def compile_launch(launch: KernelLaunch, arch: int) -> MachineCode:
    """Compile a launch with Triton, whose exceptions are not caught."""
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(launch.source, target=target, options=dict(launch.options))
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)

    def used(name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", usage)
        assert found, f"cuobjdump says nothing of {name}"
        return int(found.group(1))

    return MachineCode(
        registers=used("REG"),
        stack=used("STACK"),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=int(compiled.metadata.shared),
        warps=int(compiled.metadata.num_warps),
        loads=_widest(ptx, "ld"),
        stores=_widest(ptx, "st"),
        products=tuple(sorted(Counter(PRODUCT.findall(code)))),
        slow_conversions=max(
            (each.count("F2F.BF16") for each in loops_of(code) if PRODUCT.search(each)), default=0
        ),
    )


def loops_of(code: str) -> Iterator[str]:
    """Yield the disassembly of each loop, from its label to the last branch back to it."""
    labels = {
        found[1]: found.start() for found in re.finditer(r"^(\.L_x_\d+):", code, re.MULTILINE)
    }
    for branch in re.finditer(r"\bBRA\b[^\n]*?`\((\.L_x_\d+)\)", code):
        if labels[branch[1]] < branch.start():
            yield code[labels[branch[1]] : branch.start()]


def _run(tool: str, *args: str) -> str:
    return subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout


def complaints(
    promise: Promise, code: MachineCode, arch: int, *, bounded: bool = False
) -> list[str]:
    """Return the requirements that one launch's machine code does not meet.

    For architectures other than `PROMISED`, only the shared memory is checked. `bounded`: the
    launch limits its registers, so that spills are accepted.
    """
    found: list[str] = []
    if code.shared > SHARED.get(arch, code.shared):
        found.append(f"{code.shared} bytes of shared memory, there are {SHARED[arch]}")
    if arch != PROMISED:
        return found
    if (code.spills or code.stack) and not bounded:
        found.append(f"{code.spills} spills, a stack of {code.stack} bytes")
    if code.stores < min(promise.access, promise.stores) or code.loads < promise.access:
        found.append(
            f"loads of {code.loads} and stores of {code.stores} bytes at most, "
            f"promised are {promise.access}"
        )
    if code.slow_conversions:
        found.append(
            f"{code.slow_conversions} conversions to bfloat16 of one value each in a loop of "
            "products (F2F.BF16): convert by way of float32"
        )
    if promise.hgmma and "HGMMA" not in code.products:
        found.append(f"no HGMMA, only {', '.join(code.products) or 'no products'}")
    return found


def recorded_code(before: Mapping[str, Any], digest: str) -> MachineCode | None:
    """Return the recorded result of a launch, or None if it was recorded for another source."""
    if before.get("digest") != digest:
        return None
    figures = {
        field.name: before[field.name] for field in fields(MachineCode) if field.name in before
    }
    return MachineCode(**figures | {"products": tuple(figures["products"])})


def compare(code: MachineCode, before: Mapping[str, Any] | None) -> list[str]:
    """Return the values of a launch that exceed the recorded ones by more than the tolerance."""
    if before is None:
        return ["is not recorded: run with --write"]
    return [
        f"{what} {before[what]} -> {now}"
        for what in ("registers", "shared", "spills")
        if (now := getattr(code, what)) > before[what] * MORE_REGISTERS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit status is 1 if a requirement is not met."""
    parser = argparse.ArgumentParser(prog="python -m saccade_bench.lab.aot", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="80, 90, 100 ...")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"record the results in {RECORD}/")
    parser.add_argument("--all", action="store_true", help="also compile recorded launches")
    args = parser.parse_args(argv)
    # Triton 3.9 has the same default, but warns if the variable is unset.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from saccade_bench.lab.aot_cases import cases  # imports Triton, so the variable is set first

    bad = []
    for arch in args.arch:
        path = RECORD / f"sm_{arch}-triton-{triton.__version__}.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        found: dict[str, dict[str, Any]] = {}
        compiled = 0
        promised, launched = set[str](), set[str]()
        for case in tqdm(cases(), desc=f"sm_{arch}", unit="case", disable=None):
            if args.only not in case.name:
                continue
            if arch < case.least_arch:
                tqdm.write(f"{case.name:60s} needs sm_{case.least_arch}")
                continue
            launches = launches_of(case, arch)
            promised |= set(case.promises)
            launched |= {launch.name for launch in launches}
            for at, launch in enumerate(launches):
                name = f"{case.name}: {launch.name}" + (f" {at}" if at else "")
                promise = case.promises[launch.name]
                before = record.get(name)
                code = None if args.all else recorded_code(before or {}, launch.digest)
                if code is None:
                    compiled += 1
                    code = compile_launch(launch, arch)
                found[name] = asdict(code) | {"digest": launch.digest}
                told = complaints(promise, code, arch, bounded="maxnreg" in launch.options)
                if record and not args.write:
                    told += compare(code, before)
                bad += [f"sm_{arch} {name}: {each}" for each in told]
                tqdm.write(
                    f"{name:60s} registers {code.registers:3d} shared {code.shared:6d} "
                    f"loads {code.loads:2d} stores {code.stores:2d} {' '.join(code.products)}"
                )
        bad += [f"sm_{arch}: no case launches {each}" for each in sorted(promised - launched)]
        if args.write:
            kept = record if args.only else {}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(kept | found, indent=1) + "\n")
        print(f"sm_{arch}: {compiled} of {len(found)} launches compiled, the others are recorded")
    print("\n".join(bad) or "every kernel keeps its promises")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
