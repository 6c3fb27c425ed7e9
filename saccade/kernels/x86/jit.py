"""Kernels that Numba compiles for this machine's processor, and what they share: 16-bit numbers in
32-bit registers, and how a kernel's items are dealt to threads.

Imported only where they run (`ops.X86Ops`): elsewhere Numba may be missing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ARG001 (Numba says which arguments an intrinsic has)

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from saccade.kernels.x86.jit_cache import SHARED_VALUES, code_folder, run_on_threads

ARITHMETIC = {"reassoc", "contract", "nsz"}
"""Sums may be made in any order, which is the same at every call."""
Body = Callable[[Any], None]
Block = types.CPointer(types.int64)


class Kernel:
    """A compiled `body(block)`.

    block: int64 numbers. The first is the next unclaimed item (`claim`), the second how many items
    there are. Then follows what the caller gives: addresses, counts, `bits` of real numbers.
    """

    def __init__(self, body: Body) -> None:
        compiled = numba.cfunc(
            types.void(Block), cache=_caches(), fastmath=ARITHMETIC, error_model="numpy"
        )(body)
        self._compiled = compiled  # what it compiled lives as long
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)

    def __call__(self, items: int, values: int, *numbers: int) -> None:
        """Do all `items`, which read and write about `values` values, with as many threads as torch
        has.
        """
        block = (ctypes.c_int64 * (2 + len(numbers)))(0, items, *numbers)
        run_on_threads(
            self._function, ctypes.addressof(block), items if values >= SHARED_VALUES else 1
        )


@cache
def bits(value: float) -> int:
    """Return the bits of `value` in float32, from which `real` makes it again."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@cache
def _caches() -> bool:
    """Return whether compiled kernels are kept on disk. If so, tell Numba where.

    Numba compares the time of a kernel's own file alone; ours share this one, so the folder's name
    covers all of them.
    """
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem == "jit" or path.stem.endswith("_cpu"):
            digest.update(path.read_bytes())
    folder = code_folder(f"kernels-{digest.hexdigest()[:16]}")
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
    return folder is not None


@intrinsic
def claim(context, block):
    """Take the number of the next unclaimed item."""

    def build(context, builder, signature, arguments):
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", arguments[0], one, "monotonic")

    return types.int64(Block), build


LINE = 64
"""Bytes that memory hands over at once."""


@intrinsic
def fetch(context, address):
    """Bring this address's line into the cache, for a read soon after."""

    def build(context, builder, signature, arguments):
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, everywhere, data = (ir.Constant(flag, each) for each in (0, 3, 1))
        builder.call(prefetch, [builder.inttoptr(arguments[0], byte), to_read, everywhere, data])
        return context.get_dummy_value()

    return types.none(types.int64), build


def _address_of(kind):
    @intrinsic
    def pointer(context, address):
        def build(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), build

    return pointer


octets = _address_of(types.uint8)
halves = _address_of(types.uint16)
words = _address_of(types.int32)
longs = _address_of(types.int64)
reals = _address_of(types.float32)


@intrinsic
def _real(context, pattern):
    def build(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def _pattern(context, number):
    def build(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), build


@numba.njit(inline="always")
def real(number):
    """Return the float32 that has these `bits`."""
    return _real(np.uint32(number))


@numba.njit(inline="always")
def wide(half):
    """Return a bfloat16 in float32."""
    return _real(np.uint32(np.uint32(half) << np.uint32(16)))


@numba.njit(inline="always")
def narrow(number):
    """Round a float32 to the nearest bfloat16, ties to even. NaN stays NaN."""
    pattern = _pattern(number)
    odd = (pattern >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint16((pattern + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return rounded if number == number else np.uint16(0x7FC0)


@numba.njit(inline="always")
def exponential(x):
    """Compute e to the x, to 2e-7 of it. Numba's own is a call for each value."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    z = x * np.float32(1.4426950408889634)
    whole = np.floor(z)
    part = z - whole  # 2 to that by a polynomial
    p = np.float32(1.8775767e-3)
    p = p * part + np.float32(8.9893397e-3)
    p = p * part + np.float32(5.5826318e-2)
    p = p * part + np.float32(2.4015361e-1)
    p = p * part + np.float32(6.9315308e-1)
    p = p * part + np.float32(9.9999994e-1)
    return p * _real(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))
