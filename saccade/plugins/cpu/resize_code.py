"""LLVM IR for resizing RGB images.

Each value is a sum of bytes times 16-bit weights. Sums are exact in 32 bits, so their order does
not matter. Imported only to compile, where llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from saccade.plugins.cpu.llvm import (
    I1,
    I8,
    I16,
    I32,
    I64,
    PTR,
    VOID,
    Loop,
    Value,
    declare_intrinsic,
    i64,
    load,
    mul,
    ptr_add,
    store,
)
from saccade.plugins.cpu.resize_call import FIELDS, HEIGHT, POINTERS, ROWS, WIDTH

CELL = 16
"""Size in bytes of a 128-bit part of a vector. AVX instructions shuffle and pack within
such parts.
"""
PIXEL = 3


def assembly(triple: str, wide: int) -> str:
    """Return LLVM IR for both functions.

    wide: the size of a vector in bytes, 32 or 64.
    """
    module = ir.Module()
    module.triple = triple
    _resize_width(module, Vectors(module, wide))
    _resize_height(module, Vectors(module, wide))
    return str(module)


class Vectors:
    """Emits instructions for vectors of `wide` bytes."""

    def __init__(self, module: Value, wide: int) -> None:
        kinds = I8, I16, I32
        self.wide = wide
        self.bytes, self.shorts, self.sums = (
            ir.VectorType(kind, 8 * wide // kind.width) for kind in kinds
        )
        names = {
            32: ("avx2.pmadd.wd", "avx2.packssdw", "avx2.packuswb"),
            64: ("avx512.pmaddw.d.512", "avx512.packssdw.512", "avx512.packuswb.512"),
        }[wide]
        results = (self.sums, self.shorts), (self.shorts, self.sums), (self.bytes, self.shorts)
        self._multiply, self._to_shorts, self._to_bytes = (
            declare_intrinsic(module, f"llvm.x86.{name}", result, given, given)
            for name, (result, given) in zip(names, results)
        )

    def weighed(self, b: Value, pairs: Value, weights: Value, sums: Value) -> Value:
        """Emit code that adds the weighted sum of each pair of 16-bit values to `sums`
        (`pmaddwd`).
        """
        shorts = [b.bitcast(each, self.shorts) for each in (pairs, weights)]
        return b.add(sums, b.call(self._multiply, shorts))

    def pick(self, b: Value, one: Value, other: Value, places: Sequence[int]) -> Value:
        """Emit a shuffle of bytes within each cell.

        places: the source of each byte of the result: 0 to 15 is a byte of `one`, and 16 to 31 is a
        byte of `other`.
        """
        mask = [
            cell + each if each < CELL else self.wide + cell + each - CELL
            for cell in range(0, self.wide, CELL)
            for each in places
        ]
        return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, self.wide), mask))

    def rounded(self, b: Value, sums: Sequence[Value], shift: Value) -> Value:
        """Emit code that shifts four vectors of sums right, and packs them as bytes, clamped to 0
        to 255.
        """
        whole = [b.ashr(sum_, shift) for sum_ in sums]
        halves = [b.call(self._to_shorts, whole[at : at + 2]) for at in (0, 2)]
        return b.call(self._to_bytes, halves)

    def repeated(self, b: Value, value: Value) -> Value:
        """Emit a broadcast of a 32-bit value to all lanes."""
        nothing = ir.Constant(self.sums, ir.Undefined)
        first = b.insert_element(nothing, value, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.sums.count), [0] * self.sums.count)
        return b.shuffle_vector(first, nothing, zeros)

    @property
    def zeros(self) -> Value:
        return ir.Constant(self.bytes, [0] * self.wide)


def _begin(module: Value, name: str) -> tuple[Value, dict[str, Value]]:
    function = ir.Function(module, ir.FunctionType(VOID, [PTR]), name)
    b = ir.IRBuilder(function.append_basic_block())
    said = {
        field: load(b, PTR if field in POINTERS else I64, function.args[0], 8 * index, 8)
        for index, field in enumerate(FIELDS)
    }
    return b, said


def _half(b: Value, vectors: Vectors, said: dict[str, Value]) -> tuple[Value, Value]:
    """Emit and return a vector of the shift, and a vector of 0.5 in fixed point, which makes sums
    round to nearest.
    """
    shift = b.trunc(said["shift"], I32)
    half = b.shl(ir.Constant(I32, 1), b.sub(shift, ir.Constant(I32, 1)))
    return vectors.repeated(b, shift), vectors.repeated(b, half)


def _resize_width(module: Value, vectors: Vectors) -> None:
    """Emit `resize_width`, which processes ROWS rows at a time, each in its own cell of a
    vector.
    """
    b, said = _begin(module, WIDTH)
    shift, half = _half(b, vectors, said)
    in_vector = vectors.wide // CELL
    blocks = b.sdiv(b.add(said["rows"], i64(ROWS - 1)), i64(ROWS))
    block = Loop(b, blocks)
    last = b.sub(said["rows"], i64(1))
    sources, targets = [], []
    for row in range(ROWS):  # the last block may repeat the last row
        at = b.add(mul(b, block.index, ROWS), i64(row))
        at = b.select(b.icmp_signed("<", at, last), at, last)
        sources.append(ptr_add(b, said["source"], b.mul(at, said["source_stride"])))
        targets.append(ptr_add(b, said["target"], b.mul(at, said["target_stride"])))
    column = Loop(b, said["columns"])
    begin = mul(b, load(b, I64, said["first"], mul(b, column.index, 8), 8), PIXEL)
    weights = ptr_add(b, said["weights"], mul(b, column.index, said["taps"], 2))
    count = ROWS // in_vector
    tap = Loop(b, b.sdiv(said["taps"], i64(4)), [half] * count)
    offset = b.add(begin, mul(b, tap.index, 4 * PIXEL))
    pairs = [
        vectors.repeated(b, load(b, I32, weights, b.add(mul(b, tap.index, 8), i64(at))))
        for at in (0, 4)
    ]
    sums = []
    for vector, begun in enumerate(tap.values):
        rows = sources[vector * in_vector : (vector + 1) * in_vector]
        parts = [_four_pixels(module, b, ptr_add(b, row, offset)) for row in rows]
        pixels = _beside(b, vectors, parts)
        for first, by in zip((0, 2), pairs):
            begun = vectors.weighed(b, _colours(b, vectors, pixels, first), by, begun)
        sums.append(begun)
    tap.close(sums)
    made = [vectors.rounded(b, [sum_] * 4, shift) for sum_ in sums]
    for row, target in enumerate(targets):
        four = b.bitcast(made[row // in_vector], vectors.sums)
        value = b.extract_element(four, ir.Constant(I32, row % in_vector * CELL // 4))
        at = mul(b, column.index, PIXEL)
        store(b, b.trunc(value, I16), target, at)
        store(b, b.trunc(b.lshr(value, ir.Constant(I32, 16)), I8), target, b.add(at, i64(2)))
    column.close()
    block.close()
    b.ret_void()


def _four_pixels(module: Value, b: Value, source: Value) -> Value:
    four, bits = ir.VectorType(I32, 4), ir.VectorType(I1, 4)
    part = declare_intrinsic(module, "llvm.masked.load.v4i32.p0", four, PTR, I32, bits, four)
    nothing = ir.Constant(four, [0] * 4)
    return b.call(part, [source, ir.Constant(I32, 1), ir.Constant(bits, [1, 1, 1, 0]), nothing])


def _beside(b: Value, vectors: Vectors, parts: list[Value]) -> Value:
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [b.shuffle_vector(*parts[at : at + 2], order) for at in range(0, len(parts), 2)]
    return b.bitcast(parts[0], vectors.bytes)


def _colours(b: Value, vectors: Vectors, pixels: Value, first: int) -> Value:
    """Emit code that loads two adjacent pixels, and return them as pairs of 16-bit values, one pair
    for each color.
    """
    here, there = PIXEL * first, PIXEL * (first + 1)
    places: list[int] = []
    for colour in range(PIXEL):
        places += [here + colour, CELL, there + colour, CELL]  # CELL is a zero byte
    return vectors.pick(b, pixels, vectors.zeros, [*places, *[CELL] * 4])


def _resize_height(module: Value, vectors: Vectors) -> None:
    """Emit `resize_height`, which processes a vector of bytes at a time. The last vector of a row
    may overlap the previous one.
    """
    b, said = _begin(module, HEIGHT)
    shift, half = _half(b, vectors, said)
    wide = i64(vectors.wide)
    pieces = b.sdiv(b.add(said["columns"], i64(vectors.wide - 1)), wide)
    last = b.sub(said["columns"], wide)
    row = Loop(b, said["rows"])
    begin = load(b, I64, said["first"], mul(b, row.index, 8), 8)
    source = ptr_add(b, said["source"], b.mul(begin, said["source_stride"]))
    target = ptr_add(b, said["target"], b.mul(row.index, said["target_stride"]))
    weights = ptr_add(b, said["weights"], mul(b, row.index, said["taps"], 2))
    piece = Loop(b, pieces)
    at = b.mul(piece.index, wide)
    at = b.select(b.icmp_signed("<", at, last), at, last)
    tap = Loop(b, b.sdiv(said["taps"], i64(2)), [half] * 4)
    one = ptr_add(b, source, b.add(at, mul(b, tap.index, said["source_stride"], 2)))
    rows = [load(b, vectors.bytes, each) for each in (one, ptr_add(b, one, said["source_stride"]))]
    by = vectors.repeated(b, load(b, I32, weights, mul(b, tap.index, 4)))
    pairs = [_interleaved(b, vectors, rows[0], rows[1], upper) for upper in (0, 8)]
    spread = [_interleaved(b, vectors, pair, None, upper) for pair in pairs for upper in (0, 8)]
    sums = [vectors.weighed(b, each, by, begun) for each, begun in zip(spread, tap.values)]
    tap.close(sums)
    store(b, vectors.rounded(b, sums, shift), target, at)
    piece.close()
    row.close()
    b.ret_void()


def _interleaved(b: Value, vectors: Vectors, one: Value, other: Value | None, begin: int) -> Value:
    """Emit code that interleaves 8 bytes of each cell, starting at `begin`, with the bytes of
    `other`, or with zeros.
    """
    places = [at for byte in range(begin, begin + 8) for at in (byte, CELL + byte)]
    return vectors.pick(b, one, vectors.zeros if other is None else other, places)
