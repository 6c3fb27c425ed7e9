"""Compiles kernels with Numba for the host CPU, and provides their intrinsics: bfloat16
conversions, pointers, prefetch, and the shared counter from which threads claim items.

Imported only to compile (`kernel_object.py`): most processes load object files from disk. No other
module uses Numba's private API, which is `numba.core` and names with an underscore.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ARG001 (Numba determines the arguments of an intrinsic)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu_options import FastMathOptions
from numba.core.registry import cpu_target
from numba.extending import intrinsic

CHECKED_NUMBA = "0.68"
"""The Numba version that this module was tested with. Tests compare results bitwise."""
declare, local, count_up = (
    cgutils.get_or_insert_function,
    cgutils.alloca_once_value,
    cgutils.for_range,
)
"""Functions that emit an LLVM function declaration, a local variable, and a loop from 0."""
FASTMATH_FLAGS = {"reassoc", "contract", "nsz"}
"""Allow the compiler to reassociate sums. Their order is fixed once the code is compiled."""
Block = types.CPointer(types.int64)
I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def compile_body(name: str, body: Callable[[Any], None]) -> bytes:
    """Compile `body(block)`, and return an object file that exports it as the C function
    `name(block)`.
    """
    flags = Flags()
    flags.fastmath = FastMathOptions(FASTMATH_FLAGS)
    flags.error_model = "numpy"
    flags.no_rewrites = True
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.no_compile = True  # compiled once, after the entry point is added
    with global_compiler_lock:
        contexts = cpu_target.typing_context, cpu_target.target_context
        made = compile_extra(*contexts, body, (Block,), types.void, flags, {})
        return _with_entry(name, made)


def _with_entry(name: str, made: Any) -> bytes:
    """Return a compiled function as an object file, with a C entry point `name`."""
    library = made.library
    library._optimize_final_module()  # before the entry point is added, which would change results
    module = library.create_ir_module(name)
    native = made.target_context.declare_function(module, made.fndesc)
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64).as_pointer()])
    function = ir.Function(module, kind, name)
    builder = ir.IRBuilder(function.append_basic_block())
    call = made.target_context.call_conv.call_function
    call(builder, native, types.none, (Block,), function.args)  # returns no error status to check
    builder.ret_void()
    library.add_ir_module(module)
    library.finalize()
    code: bytes = library._get_compiled_object()
    return code


@intrinsic
def next_item(context, block):
    """Claim the next work item with an atomic fetch-add, and return its index."""

    def build(context, builder, signature, arguments):
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", arguments[0], one, "monotonic")

    return types.int64(Block), build


CACHE_LINE_BYTES = 64


@intrinsic
def prefetch(context, address):
    """Prefetch the cache line at this address for reading."""

    def build(context, builder, signature, arguments):
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        prefetch = declare(builder.module, kind, "llvm.prefetch.p0")
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


uint8_ptr = _address_of(types.uint8)
uint16_ptr = _address_of(types.uint16)
int32_ptr = _address_of(types.int32)
int64_ptr = _address_of(types.int64)
float32_ptr = _address_of(types.float32)


@intrinsic
def bits_to_f32(context, number):
    """Reinterpret an integer as float32."""

    def build(context, builder, signature, arguments):
        pattern = context.cast(builder, arguments[0], number, types.uint32)
        return builder.bitcast(pattern, F32)

    return types.float32(number), build


@intrinsic
def bf16_to_f32(context, half):
    def build(context, builder, signature, arguments):
        raised = builder.shl(builder.zext(arguments[0], I32), I32(16))
        return builder.bitcast(raised, F32)

    return types.float32(types.uint16), build


@intrinsic
def f32_to_bf16(context, number):
    """Convert float32 to bfloat16, rounding to nearest even. NaN stays NaN."""

    def build(context, builder, signature, arguments):
        (number,) = arguments
        pattern = builder.bitcast(number, I32)
        odd = builder.and_(builder.lshr(pattern, I32(16)), I32(1))
        half = builder.add(builder.add(pattern, I32(0x7FFF)), odd)
        rounded = builder.trunc(builder.lshr(half, I32(16)), I16)
        return builder.select(builder.fcmp_ordered("==", number, number), rounded, I16(0x7FC0))

    return types.uint16(types.float32), build


def _select(sign):
    """Return an intrinsic for min ("<") or max (">") of two signed values or floats.

    If one of the values is NaN, the result is the first.
    """

    @intrinsic
    def choose(context, first, second):
        kind = context.unify_types(first, second)
        real = isinstance(kind, types.Float)

        def build(context, builder, signature, arguments):
            one, two = arguments
            compare = builder.fcmp_ordered if real else builder.icmp_signed
            return builder.select(compare(sign, two, one), two, one)

        return kind(kind, kind), build

    return choose


minimum, maximum = _select("<"), _select(">")
"""Minimum and maximum. They compile faster than Numba's own min and max."""


def _float32(value):
    return F32(float(np.float32(value)))


@intrinsic
def exponential(context, x):
    """Compute exp(x) inline, with a relative error of 2e-7. Numba's own exp calls a function."""

    def build(context, builder, signature, arguments):
        (x,) = arguments
        for sign, bound in ((">", -87.0), ("<", 88.0)):
            bound = _float32(bound)
            x = builder.select(builder.fcmp_ordered(sign, bound, x), bound, x)
        z = builder.fmul(x, _float32(1.4426950408889634))
        whole = builder.call(builder.module.declare_intrinsic("llvm.floor", [F32]), [z])
        part = builder.fsub(z, whole)  # a polynomial approximates 2**part
        p = _float32(POLYNOMIAL[0])
        for factor in POLYNOMIAL[1:]:
            p = builder.fadd(builder.fmul(p, part), _float32(factor))
        power = builder.add(builder.fptosi(whole, I32), I32(127))
        return builder.fmul(p, builder.bitcast(builder.shl(power, I32(23)), F32))

    return types.float32(types.float32), build


POLYNOMIAL = 1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1
