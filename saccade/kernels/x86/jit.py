"""How Numba compiles kernels for this machine's processor, and what their instructions share:
16-bit numbers in 32-bit registers, and how a kernel's items are dealt to threads.

Imported only to compile (`kernel.py`): most processes find what they need on disk.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ARG001 (Numba says which arguments an intrinsic has)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu_options import FastMathOptions
from numba.core.registry import cpu_target
from numba.extending import intrinsic

ARITHMETIC = {"reassoc", "contract", "nsz"}
"""Sums may be made in any order, which is the same at every call."""
Block = types.CPointer(types.int64)


def compile_body(name: str, body: Callable[[Any], None]) -> bytes:
    """Compile `body(block)` to an object file with a function `name`, which takes the block."""
    flags = Flags()
    flags.fastmath = FastMathOptions(ARITHMETIC)
    flags.error_model = "numpy"
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.no_compile = True  # not before the entry is there: so it is compiled once
    with global_compiler_lock:
        contexts = cpu_target.typing_context, cpu_target.target_context
        made = compile_extra(*contexts, body, (Block,), types.void, flags, {})
        return _with_entry(name, made)


def _with_entry(name: str, made: Any) -> bytes:
    """Return a function's object file, with a `name` for C that calls it."""
    library = made.library
    library._optimize_final_module()  # first alone: in one go with the entry, bits may differ
    module = library.create_ir_module(name)
    native = made.target_context.declare_function(module, made.fndesc)
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64).as_pointer()])
    function = ir.Function(module, kind, name)
    builder = ir.IRBuilder(function.append_basic_block())
    call = made.target_context.call_conv.call_function
    call(builder, native, types.none, (Block,), function.args)  # it cannot fail
    builder.ret_void()
    library.add_ir_module(module)
    library.finalize()
    code: bytes = library._get_compiled_object()
    return code


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
