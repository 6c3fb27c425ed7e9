"""Packing keys and values for attention on x86 processors, told to LLVM through llvmlite, and the
steps shared with their products (`attention_code.py`, the only one to import this).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from saccade.kernels.x86.attention_call import CHUNK, FIELDS, POINTERS
from saccade.kernels.x86.llvm import (
    F32,
    I16,
    I32,
    I64,
    INTS,
    LINE,
    PTR,
    VOID,
    Claims,
    Loop,
    Value,
    every,
    known,
    load,
    number,
    place,
    store,
    times,
)

TILE = 16 * LINE
"""Bytes of a tile: 16 rows of 16 float32, or of 32 bfloat16 numbers."""
FP8_LEAST = 2.0**-9
"""The least amount above 0 in FP8 (e4m3). Amounts below 8 times that are its multiples."""
FP8_MAGNITUDE, FP8_SIGN = 0x7F, 0x80
"""Bits of a number in FP8. All ones in the first are no number."""
BRAIN_ABOVE = (127 - 7) << 7
"""What an exponent of bfloat16 has more than that of FP8, where bfloat16 has it."""
BRAIN_NAN = 0x7FC0


def steps_of(dim: int) -> int:
    """Return how many tiles hold a key's values, 32 each."""
    return -(-dim // 32)


def columns_of(dim: int) -> int:
    """Return how many tiles hold a row's sums, 16 values each."""
    return -(-dim // 16)


def new_function(module: Value, name: str, *kinds: Value) -> tuple[Value, list[Value]]:
    function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
    function.linkage = "internal"
    return ir.IRBuilder(function.append_basic_block()), list(function.args)


def take_piece(task: Claims, leave: Callable[[], object] = lambda: None) -> tuple[Value, Value]:
    """Take a piece and return its (head, block).

    All heads of a block that packs its own keys follow each other: its rows stay in the cache.
    """
    b, heads, blocks = task.b, task.said["heads"], task.said["blocks"]
    piece = task.take_piece(b.mul(heads, blocks), leave)
    own = packs_its_own(task)
    inner = b.select(own, heads, blocks)
    high, low = b.sdiv(piece, inner), b.srem(piece, inner)
    return b.select(own, low, high), b.select(own, high, low)


def packs_its_own(task: Claims) -> Value:
    return task.b.icmp_signed("!=", task.said["own"], number(0))


def masked_load(
    b: Value, module: Value, pointer: Value, there: int, of: int, item: int = 2
) -> Value:
    """Load `there` bfloat16 numbers into a vector with `of` lanes; the rest are zeros.

    item: bytes of a number. With 1 they are FP8, and become bfloat16.
    """
    kind = ir.VectorType(ir.IntType(8 * item), of)
    if there >= of:
        found = load(b, kind, pointer, align=item)
    else:
        bits = ir.VectorType(ir.IntType(1), of)
        name = f"llvm.masked.load.v{of}i{8 * item}.p0"
        function = known(module, name, kind, PTR, I32, bits, kind)
        mask = ir.Constant(bits, [lane < there for lane in range(of)])
        found = b.call(function, [pointer, ir.Constant(I32, item), mask, every(kind, 0)])
    return found if item == 2 else _brains(b, found)


def _brains(b: Value, eights: Value) -> Value:
    """Turn a vector in FP8 into bfloat16, which holds every number of FP8."""
    ints, floats = (ir.VectorType(kind, eights.type.count) for kind in (I32, F32))
    wide = b.zext(eights, ints)
    amount = b.and_(wide, every(ints, FP8_MAGNITUDE))
    multiple = b.fmul(b.uitofp(amount, floats), every(floats, FP8_LEAST))
    little = b.lshr(b.bitcast(multiple, ints), every(ints, 16))
    found = b.add(b.shl(amount, every(ints, 4)), every(ints, BRAIN_ABOVE))
    found = b.select(b.icmp_unsigned("<", amount, every(ints, 8)), little, found)
    no_number = b.icmp_unsigned("==", amount, every(ints, FP8_MAGNITUDE))
    found = b.select(no_number, every(ints, BRAIN_NAN), found)
    sign = b.shl(b.and_(wide, every(ints, FP8_SIGN)), every(ints, 8))
    return b.trunc(b.or_(found, sign), ir.VectorType(I16, eights.type.count))


def make_pack(module: Value, dim: int, pack_chunk: Value) -> None:
    """Make the function `pack`. A piece is a chunk of one head's keys."""
    task = Claims(module, "pack", FIELDS, POINTERS)
    head, chunk = take_piece(task)
    at = task.b.add(task.b.mul(head, task.said["chunks"]), chunk)
    rows = place(task.b, task.said["rows"], times(task.b, chunk, CHUNK * 8))
    pack_one(task, pack_chunk, dim, head, rows, at, (task.said["keys"], task.said["values"]))
    task.done()


def pack_one(
    task: Claims,
    pack_chunk: Value,
    dim: int,
    head: Value,
    rows: Value,
    at: Value,
    targets: Sequence[Value],
) -> None:
    """Pack a head's keys that lie at `rows` into chunk `at` of the targets: keys, values."""
    b, said = task.b, task.said
    sizes = CHUNK // 16 * steps_of(dim) * TILE, CHUNK // 32 * columns_of(dim) * TILE
    packed = [place(b, target, times(b, at, size)) for target, size in zip(targets, sizes)]
    k, v = (place(b, said[side], b.mul(head, said[f"{side}_head"])) for side in "kv")
    b.call(pack_chunk, [rows, k, said["k_row"], v, said["v_row"], said["nothing"], *packed])


def make_find(module: Value) -> Value:
    """Make a function that finds where keys on pages lie.

    Arguments: (pages, page size, first key, keys, rows, count). Writes `count` places from the
    first key on, -1 beyond the sequence's keys.
    """
    kinds = PTR, I64, I64, I64, PTR, I64
    b, (pages, size, first, keys, rows, count) = new_function(module, "find", *kinds)
    last = b.sdiv(b.sub(keys, number(1)), size)
    loop = Loop(b, count, [b.sdiv(first, size), b.srem(first, size)])
    page, offset = loop.values
    known_page = b.select(b.icmp_signed("<", page, last), page, last)
    begins = b.mul(b.sext(load(b, I32, pages, times(b, known_page, 4), 4), I64), size)
    there = b.icmp_signed("<", b.add(first, loop.index), keys)
    where = b.select(there, b.add(begins, offset), number(-1))
    b.store(where, place(b, rows, times(b, loop.index, 8)), align=8)
    following = b.add(offset, number(1))
    ended = b.icmp_signed("==", following, size)
    loop.close(
        [b.add(page, b.zext(ended, I64)), b.select(ended, number(0), following)],
    )
    b.ret_void()
    return b.function


def make_fetch(module: Value, dim: int, item: int) -> Value:
    """Make a function that asks for a chunk of one head's keys, or of its values.

    Arguments: (rows, k or v, its row). They are in the second cache soon.
    """
    b, (rows, start, stride) = new_function(module, "fetch", PTR, PTR, I64)
    ask = known(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    how = [ir.Constant(I32, value) for value in (0, 2, 1)]  # read, to the second cache, data
    loop = Loop(b, number(CHUNK))
    row = load(b, I64, rows, times(b, loop.index, 8), 8)
    lies = place(b, start, b.mul(row, stride))
    for line in range(0, dim * item, LINE):
        b.call(ask, [place(b, lies, line), *how])
    loop.close()
    b.ret_void()
    return b.function


def make_pack_chunk(module: Value, dim: int, item: int) -> Value:
    """Make a function that packs a chunk of one head's keys, `item` bytes a number.

    Arguments: (rows, k, its row, v, its row, nothing, keys, values)
    """
    kinds = PTR, PTR, I64, PTR, I64, PTR, PTR, PTR
    b, (rows, k, k_row, v, v_row, nothing, keys, values) = new_function(
        module, "pack_chunk", *kinds
    )
    steps, columns = steps_of(dim), columns_of(dim)

    def sources(start: Value, stride: Value, first: Value, count: int) -> list[Value]:
        found = []
        for key in range(count):
            row = load(b, I64, rows, times(b, b.add(first, number(key)), 8), 8)
            lies = place(b, start, b.mul(row, stride))
            found.append(b.select(b.icmp_signed("<", row, number(0)), nothing, lies))
        return found

    loop = Loop(b, number(CHUNK // 16))
    from_ = sources(k, k_row, times(b, loop.index, 16), 16)
    for step in range(steps):
        there = dim - 32 * step
        lines = [
            b.bitcast(
                masked_load(b, module, place(b, each, 32 * item * step), there, 32, item), INTS
            )
            for each in from_
        ]
        for pair, line in enumerate(_turned(b, lines)):
            where = b.add(times(b, loop.index, steps * TILE), number(step * TILE + pair * LINE))
            store(b, line, keys, where)
    loop.close()
    loop = Loop(b, number(CHUNK // 2))
    two = sources(v, v_row, times(b, loop.index, 2), 2)
    group = b.lshr(loop.index, number(4))
    pair = b.and_(loop.index, number(15))
    for column in range(columns):
        there = dim - 16 * column
        low, high = (
            b.zext(
                masked_load(b, module, place(b, each, 16 * item * column), there, 16, item), INTS
            )
            for each in two
        )
        both = b.or_(low, b.shl(high, every(INTS, 16)))
        where = b.add(times(b, group, columns * TILE), times(b, pair, LINE))
        store(b, both, values, b.add(where, number(column * TILE)))
    loop.close()
    b.ret_void()
    return b.function


def _turned(b: Value, lines: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16 numbers in four steps, by halves of 1, 2, 4, 8."""
    for size in (1, 2, 4, 8):
        low = [lane if not lane & size else lane - size + 16 for lane in range(16)]
        high = [lane + size if not lane & size else lane + 16 for lane in range(16)]
        turned = list(lines)
        for first in range(16):
            if not first & size:
                two = lines[first], lines[first + size]
                turned[first] = b.shuffle_vector(*two, ir.Constant(INTS, low))
                turned[first + size] = b.shuffle_vector(*two, ir.Constant(INTS, high))
        lines = turned
    return lines
