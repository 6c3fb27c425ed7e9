"""LLVM IR that packs keys and values for attention on x86 CPUs, and helpers for
`attention_code.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from saccade.plugins.cpu.attention_call import CHUNK, FIELDS, POINTERS
from saccade.plugins.cpu.llvm import (
    CACHE_LINE_BYTES,
    F32,
    I16,
    I32,
    I64,
    PTR,
    V16I32,
    VOID,
    Loop,
    Value,
    WorkQueue,
    declare_intrinsic,
    i64,
    load,
    mul,
    ptr_add,
    splat,
    store,
)

TILE = 16 * CACHE_LINE_BYTES
"""Size in bytes of a tile: 16 rows of 16 float32 values, or of 32 bfloat16 values."""
FP8_MIN_SUBNORMAL = 2.0**-9
"""The smallest positive FP8 (e4m3) value. Values below 8 times that are its multiples."""
FP8_MAGNITUDE, FP8_SIGN = 0x7F, 0x80
"""Bit masks of FP8. A magnitude of all ones is NaN."""
BF16_REBIAS = (127 - 7) << 7
"""Difference of the exponent biases of bfloat16 and FP8, in the position of a bfloat16 exponent."""
BF16_NAN = 0x7FC0


def steps_of(dim: int) -> int:
    """Return the number of tiles for a key's values, 32 in each."""
    return -(-dim // 32)


def columns_of(dim: int) -> int:
    """Return the number of tiles for a row's sums, 16 in each."""
    return -(-dim // 16)


def new_function(module: Value, name: str, *kinds: Value) -> tuple[Value, list[Value]]:
    function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
    function.linkage = "internal"
    return ir.IRBuilder(function.append_basic_block()), list(function.args)


def next_head_block(
    task: WorkQueue, on_exit: Callable[[], object] = lambda: None
) -> tuple[Value, Value]:
    """Emit code that claims a work block, and return the block's (head, block).

    If blocks pack their own keys, consecutive work blocks are the heads of one block, so its rows
    stay in cache.
    """
    b, heads, blocks = task.b, task.args["heads"], task.args["blocks"]
    item = task.next_block(b.mul(heads, blocks), on_exit)
    own = packs_own_keys(task)
    inner = b.select(own, heads, blocks)
    high, low = b.sdiv(item, inner), b.srem(item, inner)
    return b.select(own, low, high), b.select(own, high, low)


def packs_own_keys(task: WorkQueue) -> Value:
    return task.b.icmp_signed("!=", task.args["own"], i64(0))


def masked_load(
    b: Value, module: Value, pointer: Value, valid: int, lanes: int, item: int = 2
) -> Value:
    """Emit code that loads `valid` values into a bfloat16 vector with `lanes` lanes, padded with
    zeros.

    item: bytes per value: 2 for bfloat16, or 1 for FP8, which is converted.
    """
    type_ = ir.VectorType(ir.IntType(8 * item), lanes)
    if valid >= lanes:
        loaded = load(b, type_, pointer, align=item)
    else:
        bits = ir.VectorType(ir.IntType(1), lanes)
        name = f"llvm.masked.load.v{lanes}i{8 * item}.p0"
        function = declare_intrinsic(module, name, type_, PTR, I32, bits, type_)
        mask = ir.Constant(bits, [lane < valid for lane in range(lanes)])
        loaded = b.call(function, [pointer, ir.Constant(I32, item), mask, splat(type_, 0)])
    return loaded if item == 2 else _bf16_vector(b, loaded)


def _bf16_vector(b: Value, eights: Value) -> Value:
    """Emit the conversion of FP8 (e4m3) to bfloat16 bits. It is exact."""
    ints, floats = (ir.VectorType(kind, eights.type.count) for kind in (I32, F32))
    wide = b.zext(eights, ints)
    amount = b.and_(wide, splat(ints, FP8_MAGNITUDE))
    multiple = b.fmul(b.uitofp(amount, floats), splat(floats, FP8_MIN_SUBNORMAL))
    little = b.lshr(b.bitcast(multiple, ints), splat(ints, 16))
    result = b.add(b.shl(amount, splat(ints, 4)), splat(ints, BF16_REBIAS))
    result = b.select(b.icmp_unsigned("<", amount, splat(ints, 8)), little, result)
    no_number = b.icmp_unsigned("==", amount, splat(ints, FP8_MAGNITUDE))
    result = b.select(no_number, splat(ints, BF16_NAN), result)
    sign = b.shl(b.and_(wide, splat(ints, FP8_SIGN)), splat(ints, 8))
    return b.trunc(b.or_(result, sign), ir.VectorType(I16, eights.type.count))


def make_pack(module: Value, dim: int, pack_chunk: Value) -> None:
    """Emit the function `pack`. One work block is a chunk of one head's keys."""
    task = WorkQueue(module, "pack", FIELDS, POINTERS)
    head, chunk = next_head_block(task)
    index = task.b.add(task.b.mul(head, task.args["chunks"]), chunk)
    rows = ptr_add(task.b, task.args["rows"], mul(task.b, chunk, CHUNK * 8))
    pack_one(task, pack_chunk, dim, head, rows, index, (task.args["keys"], task.args["values"]))
    task.end_block()


def pack_one(
    task: WorkQueue,
    pack_chunk: Value,
    dim: int,
    head: Value,
    rows: Value,
    chunk: Value,
    targets: Sequence[Value],
) -> None:
    """Emit code that packs a chunk of one head's keys and values.

    rows: a pointer to the indices of the keys.
    chunk: index of the chunk in the targets.
    targets: pointers to packed keys and packed values.
    """
    b, args = task.b, task.args
    sizes = CHUNK // 16 * steps_of(dim) * TILE, CHUNK // 32 * columns_of(dim) * TILE
    packed = [ptr_add(b, target, mul(b, chunk, size)) for target, size in zip(targets, sizes)]
    k, v = (ptr_add(b, args[side], b.mul(head, args[f"{side}_head"])) for side in "kv")
    b.call(pack_chunk, [rows, k, args["k_row"], v, args["v_row"], args["nothing"], *packed])


def make_find_rows(module: Value) -> Value:
    """Emit a function that computes the indices of a sequence's keys in the KV cache.

    It writes `count` indices to `rows`, from the first key on, and -1 beyond the last key.

    Its arguments: (pages, page size, first key, number of keys, rows, count)
    """
    kinds = PTR, I64, I64, I64, PTR, I64
    b, (pages, size, first, keys, rows, count) = new_function(module, "find", *kinds)
    last = b.sdiv(b.sub(keys, i64(1)), size)
    loop = Loop(b, count, [b.sdiv(first, size), b.srem(first, size)])
    page, offset = loop.values
    clamped_page = b.select(b.icmp_signed("<", page, last), page, last)
    begins = b.mul(b.sext(load(b, I32, pages, mul(b, clamped_page, 4), 4), I64), size)
    valid = b.icmp_signed("<", b.add(first, loop.index), keys)
    row = b.select(valid, b.add(begins, offset), i64(-1))
    b.store(row, ptr_add(b, rows, mul(b, loop.index, 8)), align=8)
    following = b.add(offset, i64(1))
    ended = b.icmp_signed("==", following, size)
    loop.close(
        [b.add(page, b.zext(ended, I64)), b.select(ended, i64(0), following)],
    )
    b.ret_void()
    return b.function


def make_prefetch(module: Value, dim: int, item: int) -> Value:
    """Emit a function that prefetches a chunk of one head's keys, or of its values, into L2.

    Its arguments: (indices of the keys, k or v, its row stride)
    """
    b, (rows, start, stride) = new_function(module, "fetch", PTR, PTR, I64)
    prefetch = declare_intrinsic(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    options = [ir.Constant(I32, value) for value in (0, 2, 1)]  # read, into L2, data
    loop = Loop(b, i64(CHUNK))
    row = load(b, I64, rows, mul(b, loop.index, 8), 8)
    pointer = ptr_add(b, start, b.mul(row, stride))
    for line in range(0, dim * item, CACHE_LINE_BYTES):
        b.call(prefetch, [ptr_add(b, pointer, line), *options])
    loop.close()
    b.ret_void()
    return b.function


def make_pack_chunk(module: Value, dim: int, item: int) -> Value:
    """Emit a function that packs a chunk of one head's keys and values. item: bytes per value.

    Its arguments: (indices of the keys, k, its row stride, v, its row stride, zeros, packed keys,
    packed values)
    """
    kinds = PTR, PTR, I64, PTR, I64, PTR, PTR, PTR
    b, (rows, k, k_row, v, v_row, zeros, keys, values) = new_function(module, "pack_chunk", *kinds)
    steps, columns = steps_of(dim), columns_of(dim)

    def sources(start: Value, stride: Value, first: Value, count: int) -> list[Value]:
        pointers = []
        for key in range(count):
            row = load(b, I64, rows, mul(b, b.add(first, i64(key)), 8), 8)
            pointer = ptr_add(b, start, b.mul(row, stride))
            pointers.append(b.select(b.icmp_signed("<", row, i64(0)), zeros, pointer))
        return pointers

    loop = Loop(b, i64(CHUNK // 16))
    from_ = sources(k, k_row, mul(b, loop.index, 16), 16)
    for step in range(steps):
        valid = dim - 32 * step
        lines = [
            b.bitcast(
                masked_load(b, module, ptr_add(b, each, 32 * item * step), valid, 32, item), V16I32
            )
            for each in from_
        ]
        for pair, line in enumerate(_transpose(b, lines)):
            offset = b.add(
                mul(b, loop.index, steps * TILE), i64(step * TILE + pair * CACHE_LINE_BYTES)
            )
            store(b, line, keys, offset)
    loop.close()
    loop = Loop(b, i64(CHUNK // 2))
    two = sources(v, v_row, mul(b, loop.index, 2), 2)
    group = b.lshr(loop.index, i64(4))
    pair = b.and_(loop.index, i64(15))
    for column in range(columns):
        valid = dim - 16 * column
        low, high = (
            b.zext(
                masked_load(b, module, ptr_add(b, each, 16 * item * column), valid, 16, item),
                V16I32,
            )
            for each in two
        )
        both = b.or_(low, b.shl(high, splat(V16I32, 16)))
        offset = b.add(mul(b, group, columns * TILE), mul(b, pair, CACHE_LINE_BYTES))
        store(b, both, values, b.add(offset, i64(column * TILE)))
    loop.close()
    b.ret_void()
    return b.function


def _transpose(b: Value, lines: list[Value]) -> list[Value]:
    """Emit the transposition of a 16 x 16 matrix in four steps, which swap blocks of size 1, 2, 4
    and 8.
    """
    for size in (1, 2, 4, 8):
        low = [lane if not lane & size else lane - size + 16 for lane in range(16)]
        high = [lane + size if not lane & size else lane + 16 for lane in range(16)]
        turned = list(lines)
        for first in range(16):
            if not first & size:
                two = lines[first], lines[first + size]
                turned[first] = b.shuffle_vector(*two, ir.Constant(V16I32, low))
                turned[first + size] = b.shuffle_vector(*two, ir.Constant(V16I32, high))
        lines = turned
    return lines
