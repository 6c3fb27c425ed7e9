"""Helpers for emitting LLVM IR through llvmlite: types of vectors with 16 lanes, loops, and a queue
of work blocks. Imported only to compile, where llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from llvmlite import ir

from saccade.plugins.cpu.vnni_call import LANES

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, PTR, VOID = ir.HalfType(), ir.FloatType(), ir.PointerType(), ir.VoidType()
V16I32, V16F32, V16I1 = (ir.VectorType(kind, LANES) for kind in (I32, F32, I1))
V16I16, V16F16, V16I8 = (ir.VectorType(kind, LANES) for kind in (I16, F16, I8))


class _BFloat16Type(ir.Type):
    """bfloat16, a type that llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16Type)

    def __hash__(self) -> int:
        return hash(_BFloat16Type)


V16BF16, V32BF16 = (ir.VectorType(_BFloat16Type(), count) for count in (LANES, 2 * LANES))
CACHE_LINE_BYTES = 64
"""Size of a cache line and of a 512-bit vector, in bytes."""
Value = Any
"""The type of LLVM values. llvmlite has no type stubs."""


def i64(value: int) -> Value:
    return ir.Constant(I64, value)


def splat(type_: Value, value: float) -> Value:
    return ir.Constant(type_, [value] * type_.count)


class Loop:
    """Emits a loop of `count` iterations, at least one. Code emitted before `close` is its body."""

    def __init__(self, b: Value, count: Value, carried: Sequence[Value] = ()) -> None:
        """Open the loop.

        carried: initial values of loop-carried variables.
        """
        before, self._b, self._count = b.block, b, count
        self._body = b.append_basic_block()
        b.branch(self._body)
        b.position_at_end(self._body)
        self.index = b.phi(I64)
        self.index.add_incoming(i64(0), before)
        self.values = [b.phi(value.type) for value in carried]
        for phi, value in zip(self.values, carried):
            phi.add_incoming(value, before)

    def close(self, values: Sequence[Value] = ()) -> None:
        """Close the loop.

        values: the loop-carried variables at the end of an iteration.
        """
        b, after = self._b, self._b.append_basic_block()
        following = b.add(self.index, i64(1))
        for phi, value in zip([self.index, *self.values], [following, *values], strict=True):
            phi.add_incoming(value, b.block)
        b.cbranch(b.icmp_signed("<", following, self._count), self._body, after)
        b.position_at_end(after)


def ptr_add(b: Value, pointer: Value, offset: Value | int) -> Value:
    """Emit the addition of an offset in bytes to a pointer."""
    index = i64(offset) if isinstance(offset, int) else offset
    return b.gep(pointer, [index], source_etype=I8)


def load(b: Value, type_: Value, pointer: Value, offset: Value | int = 0, align: int = 1) -> Value:
    return b.load(ptr_add(b, pointer, offset), typ=type_, align=align)


def store(b: Value, value: Value, pointer: Value, offset: Value | int = 0) -> None:
    b.store(value, ptr_add(b, pointer, offset), align=1)


def mul(b: Value, first: Value, *others: Value | int) -> Value:
    for value in others:
        first = b.mul(first, i64(value) if isinstance(value, int) else value)
    return first


def smin(b: Value, value: Value, other: Value) -> Value:
    return b.select(b.icmp_signed("<", value, other), value, other)


def broadcast(b: Value, value: Value, lanes: int = LANES) -> Value:
    type_ = ir.VectorType(value.type, lanes)
    undefined = ir.Constant(type_, ir.Undefined)
    first = b.insert_element(undefined, value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, splat(ir.VectorType(I32, lanes), 0))


def declare_intrinsic(module: Value, name: str, result: Value, *arguments: Value) -> Value:
    if name in module.globals:
        return module.globals[name]
    return ir.Function(module, ir.FunctionType(result, arguments), name)


class WorkQueue:
    """Emits a function that claims work blocks from a shared atomic counter, so any number of
    threads may run it. The builder is positioned in the body that handles one block.
    """

    def __init__(
        self,
        module: Value,
        name: str,
        fields: Sequence[str],
        pointers: Collection[str],
        scratch: Sequence[int] = (),
    ) -> None:
        """Open the function.

        fields: names of its arguments, 64 bits each; the first is the counter of claimed blocks.
        pointers: the fields that are addresses; the others are integers.
        scratch: sizes of stack buffers in bytes, multiples of a cache line.
        """
        self.function = ir.Function(module, ir.FunctionType(VOID, [PTR]), name)
        self.b = ir.IRBuilder(self.function.append_basic_block())
        self.scratch = [
            self.b.alloca(ir.ArrayType(V16F32, size // CACHE_LINE_BYTES)) for size in scratch
        ]
        self._call = self.function.args[0]
        self.args = {
            field: load(self.b, PTR if field in pointers else I64, self._call, 8 * index, 8)
            for index, field in enumerate(fields)
            if index
        }
        self._loop = self.b.append_basic_block()

    def next_block(self, count: Value, on_exit: Callable[[], object] = lambda: None) -> Value:
        """Emit an atomic fetch-add, and return the index of the claimed block, below `count`.

        on_exit: emits code for when no blocks remain.
        """
        b = self.b
        work, end = b.append_basic_block(), b.append_basic_block()
        b.branch(self._loop)
        b.position_at_end(end)
        on_exit()
        b.ret_void()
        b.position_at_end(self._loop)
        block = b.atomic_rmw("add", self._call, i64(1), "monotonic")
        b.cbranch(b.icmp_signed("<", block, count), work, end)
        b.position_at_end(work)
        return block

    def end_block(self) -> None:
        """Branch back to claim the next block."""
        self.b.branch(self._loop)

    def switch(self, which: Value, cases: Sequence[Value]) -> list[Value]:
        """Emit a switch. Returns a basic block for each value of `which`, and the block after the
        switch.

        The caller positions the builder in each block, and branches from there to the last one.
        """
        b = self.b
        end, never = b.append_basic_block(), b.append_basic_block()
        blocks = [b.append_basic_block() for _ in cases]
        switch = b.switch(which, never)
        for value, block in zip(cases, blocks):
            switch.add_case(value, block)
        b.position_at_end(never)
        b.unreachable()
        return [*blocks, end]


class MaskedStore:
    """Emits code that stores the outputs of a panel in a dtype of `vnni_call.FORMATS`, leaving out
    padding.
    """

    def __init__(self, module: Value, b: Value, kind: int, remaining: Value, vectors: int) -> None:
        """Emit the masks.

        kind: the dtype's index in FORMATS.
        remaining: the matrix's outputs from this panel on; further lanes are padding.
        vectors: the number of vectors in a panel.
        """
        self._b, self._kind = b, kind
        type_ = (V16F32, V16I16, V16F16)[kind]
        name = ("f32", "i16", "f16")[kind]
        self._store = declare_intrinsic(
            module, f"llvm.masked.store.v{LANES}{name}.p0", VOID, type_, PTR, I32, V16I1
        )
        lanes = ir.Constant(V16I32, list(range(LANES)))
        in_lane = [b.trunc(b.sub(remaining, i64(wide * LANES)), I32) for wide in range(vectors)]
        self._masks = [b.icmp_signed("<", lanes, broadcast(b, each)) for each in in_lane]

    def write(self, values: Value, target: Value, index: int) -> None:
        b, kind = self._b, self._kind
        pointer = ptr_add(b, target, index * LANES * (2 if kind else 4))
        value = convert_f32(b, kind, values)
        b.call(self._store, [value, pointer, ir.Constant(I32, 1), self._masks[index]])


def convert_f32(b: Value, kind: int, value: Value) -> Value:
    """Emit the conversion of float32 to a dtype of `vnni_call.FORMATS`, rounding to nearest even.

    kind: the dtype's index in FORMATS.
    """
    if kind == 0:
        return value
    if kind == 2:
        return b.fptrunc(value, V16F16)
    bits = b.bitcast(value, V16I32)
    upper = b.lshr(bits, splat(V16I32, 16))
    odd = b.and_(upper, splat(V16I32, 1))
    rounded = b.lshr(b.add(bits, b.add(odd, splat(V16I32, 0x7FFF))), splat(V16I32, 16))
    ordered = b.fcmp_ordered("ord", value, value)
    return b.trunc(b.select(ordered, rounded, splat(V16I32, 0x7FC0)), V16I16)
