"""What is told to LLVM through llvmlite in the same words everywhere: vectors with 16 lanes, loops,
and how functions take pieces of their work. Only files with instructions import this, where
llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from llvmlite import ir

from saccade.kernels.x86.vnni_call import LANES

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, PTR, VOID = ir.HalfType(), ir.FloatType(), ir.PointerType(), ir.VoidType()
INTS, FLOATS, BITS = (ir.VectorType(kind, LANES) for kind in (I32, F32, I1))
SHORTS, HALVES, BYTES = (ir.VectorType(kind, LANES) for kind in (I16, F16, I8))


class _Brain(ir.Type):
    """bfloat16, a type that llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brain)

    def __hash__(self) -> int:
        return hash(_Brain)


BRAINS, MORE_BRAINS = (ir.VectorType(_Brain(), count) for count in (LANES, 2 * LANES))
LINE = 64
"""Bytes of a vector, and of a cache line."""
Value = Any
"""A value of llvmlite, which has no types."""


def number(value: int) -> Value:
    return ir.Constant(I64, value)


def every(kind: Value, value: float) -> Value:
    """Return a vector that repeats one constant."""
    return ir.Constant(kind, [value] * kind.count)


class Loop:
    """Runs `count` times, at least once, what stands between its making and `close`."""

    def __init__(self, b: Value, count: Value, carried: Sequence[Value] = ()) -> None:
        """Begin the loop.

        carried: values that each turn gets from the turn before; the first turn gets these.
        """
        before, self._b, self._count = b.block, b, count
        self._body = b.append_basic_block()
        b.branch(self._body)
        b.position_at_end(self._body)
        self.index = b.phi(I64)
        self.index.add_incoming(number(0), before)
        self.values = [b.phi(value.type) for value in carried]
        for phi, value in zip(self.values, carried):
            phi.add_incoming(value, before)

    def close(self, values: Sequence[Value] = ()) -> None:
        """End the loop. values: what the next turn gets; the last ones are good after the loop."""
        b, after = self._b, self._b.append_basic_block()
        following = b.add(self.index, number(1))
        for phi, value in zip([self.index, *self.values], [following, *values], strict=True):
            phi.add_incoming(value, b.block)
        b.cbranch(b.icmp_signed("<", following, self._count), self._body, after)
        b.position_at_end(after)


def place(b: Value, pointer: Value, offset: Value | int) -> Value:
    """Return the pointer moved by `offset` bytes."""
    where = number(offset) if isinstance(offset, int) else offset
    return b.gep(pointer, [where], source_etype=I8)


def load(b: Value, kind: Value, pointer: Value, offset: Value | int = 0, align: int = 1) -> Value:
    return b.load(place(b, pointer, offset), typ=kind, align=align)


def store(b: Value, value: Value, pointer: Value, offset: Value | int = 0) -> None:
    b.store(value, place(b, pointer, offset), align=1)


def times(b: Value, first: Value, *others: Value | int) -> Value:
    for value in others:
        first = b.mul(first, number(value) if isinstance(value, int) else value)
    return first


def least(b: Value, value: Value, other: Value) -> Value:
    """Return the smaller of two whole numbers."""
    return b.select(b.icmp_signed("<", value, other), value, other)


def spread(b: Value, value: Value, lanes: int = LANES) -> Value:
    """Put one value into every lane."""
    kind = ir.VectorType(value.type, lanes)
    nothing = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(nothing, value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, nothing, every(ir.VectorType(I32, lanes), 0))


def known(module: Value, name: str, result: Value, *arguments: Value) -> Value:
    """Return an operation that LLVM knows by name."""
    if name in module.globals:
        return module.globals[name]
    return ir.Function(module, ir.FunctionType(result, arguments), name)


class Claims:
    """A function that takes its work piece by piece until all is taken, while other threads may do
    the same. The builder stands where a piece is worked on.
    """

    def __init__(
        self,
        module: Value,
        name: str,
        fields: Sequence[str],
        pointers: Collection[str],
        scratch: Sequence[int] = (),
    ) -> None:
        """Begin the function.

        fields: what it is called with, 64 bits each; the first counts the pieces that are taken.
        scratch: bytes on the stack, in whole lines.
        """
        self.function = ir.Function(module, ir.FunctionType(VOID, [PTR]), name)
        self.b = ir.IRBuilder(self.function.append_basic_block())
        self.scratch = [self.b.alloca(ir.ArrayType(FLOATS, size // LINE)) for size in scratch]
        self._call = self.function.args[0]
        self.said = {
            field: load(self.b, PTR if field in pointers else I64, self._call, 8 * index, 8)
            for index, field in enumerate(fields)
            if index
        }
        self._again = self.b.append_basic_block()

    def take_piece(self, count: Value, leave: Callable[[], object] = lambda: None) -> Value:
        """Take a piece below `count` that other threads leave alone, and return its number.

        leave: says what is done when all are taken.
        """
        b = self.b
        work, end = b.append_basic_block(), b.append_basic_block()
        b.branch(self._again)
        b.position_at_end(end)
        leave()
        b.ret_void()
        b.position_at_end(self._again)
        piece = b.atomic_rmw("add", self._call, number(1), "monotonic")
        b.cbranch(b.icmp_signed("<", piece, count), work, end)
        b.position_at_end(work)
        return piece

    def done(self) -> None:
        """End the piece, and go on to the next."""
        self.b.branch(self._again)

    def choose(self, which: Value, cases: Sequence[Value]) -> list[Value]:
        """Return blocks, one for each value that `which` may have, and last the block after them.

        Each must branch to that last block. The caller places the builder.
        """
        b = self.b
        behind, never = b.append_basic_block(), b.append_basic_block()
        blocks = [b.append_basic_block() for _ in cases]
        switch = b.switch(which, never)
        for value, block in zip(cases, blocks):
            switch.add_case(value, block)
        b.position_at_end(never)
        b.unreachable()
        return [*blocks, behind]


class Keep:
    """Writes a panel's outputs as far as there are any, `left` from here, in one of FORMATS."""

    def __init__(self, module: Value, b: Value, kind: int, left: Value, wides: int) -> None:
        """Prepare the masks. wides: vectors in a panel."""
        self._b, self._kind = b, kind
        form = (FLOATS, SHORTS, HALVES)[kind]
        name = ("f32", "i16", "f16")[kind]
        self._put = known(
            module, f"llvm.masked.store.v{LANES}{name}.p0", VOID, form, PTR, I32, BITS
        )
        lanes = ir.Constant(INTS, list(range(LANES)))
        there = [b.trunc(b.sub(left, number(wide * LANES)), I32) for wide in range(wides)]
        self._masks = [b.icmp_signed("<", lanes, spread(b, each)) for each in there]

    def write(self, values: Value, target: Value, wide: int) -> None:
        b, kind = self._b, self._kind
        where = place(b, target, wide * LANES * (2 if kind else 4))
        value = narrowed(b, kind, values)
        b.call(self._put, [value, where, ir.Constant(I32, 1), self._masks[wide]])


def narrowed(b: Value, kind: int, value: Value) -> Value:
    """Round float32 to one of FORMATS, to the nearest, ties to even."""
    if kind == 0:
        return value
    if kind == 2:
        return b.fptrunc(value, HALVES)
    bits = b.bitcast(value, INTS)
    upper = b.lshr(bits, every(INTS, 16))
    odd = b.and_(upper, every(INTS, 1))
    rounded = b.lshr(b.add(bits, b.add(odd, every(INTS, 0x7FFF))), every(INTS, 16))
    ordered = b.fcmp_ordered("ord", value, value)
    return b.trunc(b.select(ordered, rounded, every(INTS, 0x7FC0)), SHORTS)
