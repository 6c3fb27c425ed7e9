"""LLVM IR for attention in bfloat16 on x86 CPUs with AMX or AVX512-BF16.

Keys are processed in blocks of KEY_BLOCK, starting with the first. So the reduction order of a
query depends only on its own sequence, and results are batch-invariant. Imported only to compile,
where llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from llvmlite import ir

from saccade.plugins.cpu.attention_call import (
    BLOCK_FIELDS,
    CHUNK,
    FIELDS,
    KEY_BLOCK,
    POINTERS,
    QUERY_BLOCK,
    ROW_TILE,
)
from saccade.plugins.cpu.attention_pack import (
    TILE,
    columns_of,
    make_find_rows,
    make_pack,
    make_pack_chunk,
    make_prefetch,
    masked_load,
    new_function,
    next_head_block,
    pack_one,
    packs_own_keys,
    steps_of,
)
from saccade.plugins.cpu.llvm import (
    CACHE_LINE_BYTES,
    F32,
    I8,
    I16,
    I32,
    I64,
    PTR,
    V16BF16,
    V16F32,
    V16I1,
    V16I16,
    V16I32,
    V32BF16,
    VOID,
    Loop,
    Value,
    WorkQueue,
    broadcast,
    declare_intrinsic,
    i64,
    load,
    mul,
    ptr_add,
    splat,
    store,
)
from saccade.plugins.cpu.vnni_call import LANES

Isa = Literal["amx", "pairs"]
EXPONENTIAL = (1.0000026, 0.69300383, 0.24144275, 0.052011464, 0.013534168)
"""Coefficients of a polynomial for 2 ** x on [0, 1], with a relative error of 2.6e-6."""
SCORES_ROW, WEIGHTS_ROW = KEY_BLOCK * 4 + CACHE_LINE_BYTES, KEY_BLOCK * 2 + CACHE_LINE_BYTES
"""Row strides in bytes, padded by a cache line to avoid set conflicts."""
MIN_TOTAL = 1e-30
"""Minimum softmax denominator, so that the output of a row without keys is zeros."""
V32I16 = ir.VectorType(I16, 2 * LANES)
AVX512_ROWS = 8
"""Rows per step with AVX512-BF16. With two vectors of columns, these need 16 accumulators."""
BANDS = (
    (AVX512_ROWS // 2, 1),
    (AVX512_ROWS, 1),
    (2 * AVX512_ROWS, 2),
    (ROW_TILE, ROW_TILE // AVX512_ROWS),
)
"""Numbers of rows for which matmuls are emitted, and the number of bands into which each is
split.
"""


def assembly(triple: str, dim: int, kind: Isa, item: int) -> str:
    """Return LLVM IR for all functions, for heads of size `dim`.

    item: the number of bytes per value in the KV cache.
    """
    module = ir.Module()
    module.triple = triple
    pack_chunk = make_pack_chunk(module, dim, item)
    make_pack(module, dim, pack_chunk)
    _Attend(module, dim, kind, pack_chunk, make_prefetch(module, dim, item))
    return str(module)


def _least(b: Value, one: Value, other: Value) -> Value:
    return b.select(b.icmp_signed("<", one, other), one, other)


def _round_up(b: Value, value: Value, step: int) -> Value:
    return b.and_(b.add(value, i64(step - 1)), i64(-step))


def _row_offset(b: Value, row: Value, stride: Value, head: Value, fold: Value) -> Value:
    """Return the byte offset of a block's row. The heads of its fold are adjacent."""
    return b.add(b.mul(b.sdiv(row, fold), stride), b.mul(b.srem(row, fold), head))


class _Attend:
    """Emits the function `attend`, whose work blocks are blocks of one head's query rows."""

    def __init__(self, module: Value, dim: int, kind: Isa, pack_chunk: Value, fetch: Value) -> None:
        self._steps, self._columns = steps, columns = steps_of(dim), columns_of(dim)
        self._strides = q_row, out_row = steps * CACHE_LINE_BYTES, columns * CACHE_LINE_BYTES
        self._scores, self._sum_values = (
            _MatMul(module, kind, *sizes_of)
            for sizes_of in (
                ("score", steps, None, q_row, SCORES_ROW),
                ("add", None, columns, WEIGHTS_ROW, out_row),
            )
        )
        self._softmax = [_softmax_row(module, columns, masked) for masked in (False, True)]
        take, give = _load_queries(module, dim), _store_outputs(module, dim)
        sizes = (
            QUERY_BLOCK * q_row,
            QUERY_BLOCK * out_row,
            ROW_TILE * SCORES_ROW,
            ROW_TILE * WEIGHTS_ROW,
        )
        own_sizes = KEY_BLOCK // 16 * steps * TILE, KEY_BLOCK // 32 * columns * TILE, KEY_BLOCK * 8
        scratch = [*sizes, QUERY_BLOCK * 4, QUERY_BLOCK * CACHE_LINE_BYTES, *own_sizes]
        task = WorkQueue(module, "attend", FIELDS, POINTERS, scratch)
        *buffers, own_keys, own_values, own_rows = task.scratch
        self._task, self._own_rows = task, own_rows
        self._pack = pack_chunk, make_find_rows(module), fetch
        self._b, self._args, self._buffers = b, args, buffers = task.b, task.args, buffers
        if kind == "amx":
            b.call(declare_intrinsic(module, "llvm.x86.ldtilecfg", VOID, PTR), [args["tiles"]])

        def on_exit() -> None:
            if kind == "amx":
                b.call(declare_intrinsic(module, "llvm.x86.tilerelease", VOID), [])

        head, block = next_head_block(task, on_exit)
        offset = mul(b, block, len(BLOCK_FIELDS) * 8)
        block_fields = {
            name: load(b, I64, args["table"], b.add(offset, i64(8 * index)), 8)
            for index, name in enumerate(BLOCK_FIELDS)
        }
        fold, head = args["fold"], b.mul(head, args["fold"])
        self._block, count = block_fields, b.mul(block_fields["count"], fold)
        self._count = count
        queries, sums, _, _, tops, totals = buffers
        source, target = (
            ptr_add(
                b,
                args[name],
                b.add(
                    b.mul(head, args[f"{name}_head"]),
                    b.mul(block_fields["first"], args[f"{name}_row"]),
                ),
            )
            for name in ("q", "out")
        )
        b.call(
            take, [source, args["q_row"], args["q_head"], fold, queries, sums, tops, totals, count]
        )
        self._key_head, self._own = b.sdiv(head, args["group"]), packs_own_keys(task)
        self._packed = [
            b.select(self._own, own_buffer, args[side])
            for own_buffer, side in ((own_keys, "keys"), (own_values, "values"))
        ]
        self._dim = dim
        self._attend_all()
        b.call(give, [target, args["out_row"], args["out_head"], fold, sums, totals, count])
        task.end_block()

    def _visible_keys(self, row: Value) -> Value:
        b, block = self._b, self._block
        return _least(b, block["keys"], b.add(block["seen"], b.sdiv(row, self._args["fold"])))

    def _attend_all(self) -> None:
        b, count = self._b, self._count
        max_keys = self._visible_keys(b.sub(count, i64(1)))
        chunk = b.add(b.mul(self._key_head, self._args["chunks"]), self._block["chunk"])
        outer = Loop(b, b.sdiv(b.add(max_keys, i64(KEY_BLOCK - 1)), i64(KEY_BLOCK)))
        start = mul(b, outer.index, KEY_BLOCK)
        width = _least(b, b.sub(max_keys, start), i64(KEY_BLOCK))
        with b.if_then(b.and_(self._own, b.icmp_signed(">", width, i64(0)))):
            self._pack_own(start, width)
        inner = Loop(b, b.sdiv(b.add(count, i64(ROW_TILE - 1)), i64(ROW_TILE)))
        first = mul(b, inner.index, ROW_TILE)
        last = b.sub(_least(b, count, b.add(first, i64(ROW_TILE))), i64(1))
        need = b.sub(self._visible_keys(last), start)
        first_chunk = b.add(chunk, mul(b, outer.index, KEY_BLOCK // CHUNK))
        first_chunk = b.select(self._own, i64(0), first_chunk)
        inside, after = b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed(">", need, i64(0)), inside, after)
        b.position_at_end(inside)
        self._attend_chunk(
            first_chunk, start, first, _round_up(b, _least(b, need, i64(KEY_BLOCK)), CHUNK)
        )
        b.branch(after)
        b.position_at_end(after)
        inner.close()
        outer.close()

    def _pack_own(self, start: Value, width: Value) -> None:
        """Emit code that packs `width` of the block's keys from `start` on. It prefetches one chunk
        ahead.
        """
        b, args, block = self._b, self._args, self._block
        pack_chunk, find, fetch = self._pack
        width = _round_up(b, width, CHUNK)
        paged = b.icmp_signed("!=", args["page"], i64(0))
        with b.if_then(paged):
            pages = ptr_add(b, args["pages"], mul(b, block["chunk"], 4))
            b.call(find, [pages, args["page"], start, block["keys"], self._own_rows, width])
        listed = ptr_add(b, args["rows"], mul(b, b.add(mul(b, block["chunk"], CHUNK), start), 8))
        rows = b.select(paged, self._own_rows, listed)
        count = b.sdiv(width, i64(CHUNK))
        loop = Loop(b, count)
        own_rows = ptr_add(b, rows, mul(b, loop.index, CHUNK * 8))
        with b.if_then(b.icmp_signed("<", b.add(loop.index, i64(1)), count)):
            for side in "kv":
                pointer = ptr_add(b, args[side], b.mul(self._key_head, args[f"{side}_head"]))
                b.call(fetch, [ptr_add(b, own_rows, CHUNK * 8), pointer, args[f"{side}_row"]])
        pack_one(
            self._task, pack_chunk, self._dim, self._key_head, own_rows, loop.index, self._packed
        )
        loop.close()

    def _attend_chunk(self, chunk: Value, start: Value, first: Value, width: Value) -> None:
        """Emit code that attends with up to ROW_TILE rows from `first` on to `width` keys from
        `start` on.
        """
        b, (q_row, out_row) = self._b, self._strides
        rows = _least(b, b.sub(self._count, first), i64(ROW_TILE))
        queries, sums, scores, weights, tops, totals = self._buffers
        sizes = CHUNK // 16 * self._steps * TILE, CHUNK // 32 * self._columns * TILE
        keys, values = (
            ptr_add(b, packed, mul(b, chunk, size)) for packed, size in zip(self._packed, sizes)
        )
        pairs = b.sdiv(width, i64(32))
        self._scores(b, rows, [ptr_add(b, queries, mul(b, first, q_row)), keys, scores, pairs])
        row_loop = Loop(b, rows)
        row = b.add(first, row_loop.index)
        valid = b.sub(self._visible_keys(row), start)
        valid = _least(b, valid, width)
        valid = b.select(b.icmp_signed(">", valid, i64(0)), valid, i64(0))
        arguments = [
            ptr_add(b, scores, mul(b, row_loop.index, SCORES_ROW)),
            ptr_add(b, weights, mul(b, row_loop.index, WEIGHTS_ROW)),
            ptr_add(b, tops, mul(b, row, 4)),
            ptr_add(b, totals, mul(b, row, CACHE_LINE_BYTES)),
            ptr_add(b, sums, mul(b, row, out_row)),
            self._args["factor"],
            width,
            valid,
        ]
        with b.if_else(b.icmp_signed("==", valid, width)) as branches:
            for branch, function in zip(branches, self._softmax):
                with branch:
                    b.call(function, arguments)
        row_loop.close()
        self._sum_values(
            b, rows, [weights, values, ptr_add(b, sums, mul(b, first, out_row)), pairs]
        )


def _load_queries(module: Value, dim: int) -> Value:
    """Emit a function that copies queries to a buffer, and resets sums, totals and maxima.

    Its arguments: (source, its row stride, its head stride, fold, queries, sums, maxima, totals,
    count). It pads the rows to a multiple of AVX512_ROWS.
    """
    b, arguments = new_function(module, "take", PTR, I64, I64, I64, PTR, PTR, PTR, PTR, I64)
    source, stride, head, fold, queries, sums, tops, totals, count = arguments
    steps, columns = steps_of(dim), columns_of(dim)
    loop = Loop(b, _round_up(b, count, AVX512_ROWS))
    # Padding repeats the last row, and its scores are discarded.
    row = _least(b, loop.index, b.sub(count, i64(1)))
    start = ptr_add(b, source, _row_offset(b, row, stride, head, fold))
    for step in range(steps):
        values = masked_load(
            b, module, ptr_add(b, start, CACHE_LINE_BYTES * step), dim - 32 * step, 32
        )
        store(
            b,
            values,
            queries,
            b.add(mul(b, loop.index, steps * CACHE_LINE_BYTES), i64(step * CACHE_LINE_BYTES)),
        )
    for column in range(columns):
        offset = b.add(
            mul(b, loop.index, columns * CACHE_LINE_BYTES), i64(column * CACHE_LINE_BYTES)
        )
        store(b, splat(V16F32, 0.0), sums, offset)
    store(b, splat(V16F32, 0.0), totals, mul(b, loop.index, CACHE_LINE_BYTES))
    store(b, ir.Constant(F32, float("-inf")), tops, mul(b, loop.index, 4))
    loop.close()
    b.ret_void()
    return b.function


def _store_outputs(module: Value, dim: int) -> Value:
    """Emit a function that stores normalized outputs in bfloat16.

    Its arguments: (target, its row stride, its head stride, fold, sums, totals, count)
    """
    b, arguments = new_function(module, "give", PTR, I64, I64, I64, PTR, PTR, I64)
    target, stride, head, fold, sums, totals, count = arguments
    columns = columns_of(dim)
    loop = Loop(b, count)
    total = load(b, V16F32, totals, mul(b, loop.index, CACHE_LINE_BYTES), CACHE_LINE_BYTES)
    total = _reduce_lanes(b, total, b.fadd)
    least = splat(V16F32, MIN_TOTAL)
    total = b.select(b.fcmp_ordered("<", total, least), least, total)
    scale = b.fdiv(splat(V16F32, 1.0), total)
    start = ptr_add(b, target, _row_offset(b, loop.index, stride, head, fold))
    narrow = declare_intrinsic(module, "llvm.x86.avx512bf16.cvtneps2bf16.512", V16BF16, V16F32)
    bits = V16I1
    masked_store = declare_intrinsic(
        module, "llvm.masked.store.v16i16.p0", VOID, V16I16, PTR, I32, bits
    )
    for column in range(columns):
        offset = b.add(
            mul(b, loop.index, columns * CACHE_LINE_BYTES), i64(column * CACHE_LINE_BYTES)
        )
        mean = b.fmul(load(b, V16F32, sums, offset, CACHE_LINE_BYTES), scale)
        rounded = b.bitcast(b.call(narrow, [mean]), V16I16)
        mask = ir.Constant(bits, [column * 16 + lane < dim for lane in range(16)])
        b.call(masked_store, [rounded, ptr_add(b, start, 32 * column), ir.Constant(I32, 2), mask])
    loop.close()
    b.ret_void()
    return b.function


def _reduce_lanes(b: Value, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
    for size in (8, 4, 2, 1):
        lanes = ir.Constant(V16I32, [lane ^ size for lane in range(LANES)])
        vector = join(vector, b.shuffle_vector(vector, vector, lanes))
    return vector


class _Exponential:
    """Emits code for 2 ** x, for values not much above 0."""

    def __init__(self, module: Value, b: Value) -> None:
        self._b = b
        mask, fma = [V16F32, I16, I32], f"llvm.fma.v{LANES}f32"
        self._reduce = declare_intrinsic(
            module, "llvm.x86.avx512.mask.reduce.ps.512", V16F32, V16F32, I32, *mask
        )
        self._scale = declare_intrinsic(
            module, "llvm.x86.avx512.mask.scalef.ps.512", V16F32, V16F32, *mask[:1], *mask
        )
        self.fma = declare_intrinsic(module, fma, V16F32, V16F32, V16F32, V16F32)
        self._more = [splat(V16F32, 0.0), ir.Constant(I16, -1), ir.Constant(I32, 4)]

    def __call__(self, x: Value) -> Value:
        b = self._b
        part = b.call(self._reduce, [x, ir.Constant(I32, 1), *self._more])  # x - floor(x)
        *others, power = EXPONENTIAL
        power = splat(V16F32, power)
        for other in reversed(others):
            power = b.call(self.fma, [power, part, splat(V16F32, other)])
        return b.call(self._scale, [power, x, *self._more])


def _softmax_row(module: Value, columns: int, masked: bool) -> Value:
    """Emit a function that computes one row's online softmax over the next `width` keys.

    It also rescales the row's accumulated sum to the new maximum.
    masked: keys from `valid` on get weight 0.

    Its arguments: (scores, weights, maximum, total, sum, factor, width, valid)
    """
    name = "weigh_some" if masked else "weigh_all"
    b, arguments = new_function(module, name, PTR, PTR, PTR, PTR, PTR, I64, I64, I64)
    b.function.attributes.add("noinline")
    scores, weights, top, total, sum_, factor, width, valid = arguments
    power = _Exponential(module, b)
    largest = declare_intrinsic(module, "llvm.x86.avx512.max.ps.512", V16F32, V16F32, V16F32, I32)

    def maximum(one: Value, other: Value) -> Value:
        return b.call(largest, [one, other, ir.Constant(I32, 4)])

    factor = broadcast(b, b.bitcast(b.trunc(factor, I32), F32))
    lanes = ir.Constant(V16I32, list(range(LANES)))

    def read(chunk: Value, part: int) -> Value:
        offset = b.add(mul(b, chunk, CHUNK * 4), i64(part * CACHE_LINE_BYTES))
        value = load(b, V16F32, scores, offset, CACHE_LINE_BYTES)
        if not masked:
            return value
        remaining = b.trunc(b.sub(valid, b.add(mul(b, chunk, CHUNK), i64(part * LANES))), I32)
        valid_lanes = b.icmp_signed("<", lanes, broadcast(b, remaining))
        return b.select(valid_lanes, value, splat(V16F32, float("-inf")))

    chunks = b.sdiv(width, i64(CHUNK))
    parts = CHUNK // LANES
    loop = Loop(b, chunks, [splat(V16F32, float("-inf"))] * parts)
    one, two, three, four = largest_scores = [
        maximum(read(loop.index, part), loop.values[part]) for part in range(parts)
    ]
    loop.close(largest_scores)
    largest_scores = _reduce_lanes(b, maximum(maximum(one, two), maximum(three, four)), maximum)
    before = broadcast(b, load(b, F32, top, 0, 4))
    now = maximum(largest_scores, before)
    less = b.fneg(b.fmul(now, factor))
    loop = Loop(b, chunks, [splat(V16F32, 0.0)] * parts)
    exponentials = [
        power(b.call(power.fma, [read(loop.index, part), factor, less])) for part in range(parts)
    ]
    narrow = declare_intrinsic(
        module, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", V32BF16, V16F32, V16F32
    )
    for two in range(0, parts, 2):
        both = b.bitcast(b.call(narrow, [exponentials[two + 1], exponentials[two]]), V32I16)
        store(
            b, both, weights, b.add(mul(b, loop.index, CHUNK * 2), i64(two * CACHE_LINE_BYTES // 2))
        )
    one, two, three, four = added = [
        b.fadd(value, more) for value, more in zip(loop.values, exponentials)
    ]
    loop.close(added)
    new_total = b.fadd(b.fadd(one, two), b.fadd(three, four))
    b.store(b.extract_element(now, ir.Constant(I32, 0)), top, align=4)
    rescale = power(b.call(power.fma, [before, factor, less]))
    _rescale(
        b, power.fma, b.fcmp_unordered("!=", now, before), rescale, new_total, total, sum_, columns
    )
    return b.function


def _rescale(
    b: Value,
    fma: Value,
    changed: Value,
    factor: Value,
    new_total: Value,
    total: Value,
    sum_: Value,
    columns: int,
) -> None:
    """Emit code that adds the new weights to the row's total and, if the maximum has changed,
    rescales the earlier ones.
    """
    old_total = load(b, V16F32, total, 0, CACHE_LINE_BYTES)
    new, old = b.append_basic_block(), b.append_basic_block()
    b.cbranch(b.extract_element(changed, ir.Constant(I32, 0)), new, old)
    b.position_at_end(new)
    store(b, b.call(fma, [old_total, factor, new_total]), total)
    for column in range(columns):
        value = load(b, V16F32, sum_, column * CACHE_LINE_BYTES, CACHE_LINE_BYTES)
        store(b, b.fmul(value, factor), sum_, column * CACHE_LINE_BYTES)
    b.ret_void()
    b.position_at_end(old)
    store(b, b.fadd(old_total, new_total), total)
    b.ret_void()


class _MatMul:
    """Emits multiplications of rows with packed tiles, using the smallest variant for the number of
    rows.

    All variants have the same reduction order, so results are bit-identical.
    """

    def __init__(
        self,
        module: Value,
        kind: Isa,
        name: str,
        steps: int | None,
        columns: int | None,
        row: int,
        out_row: int,
    ) -> None:
        sides = steps, columns, row, out_row
        self._variants: list[tuple[int, Value]] = []  # (maximum rows, function)
        if kind == "amx":
            self._variants = [(ROW_TILE, _amx_matmul(module, name, *sides))]
            return
        for most, bands in BANDS:
            function = _avx512_matmul(
                module, f"{name}_{most}", *sides, band_rows=most // bands, bands=bands
            )
            self._variants.append((most, function))

    def __call__(self, b: Value, rows: Value, arguments: Sequence[Value]) -> None:
        """Emit code that multiplies the first `rows` rows. It may multiply further rows, up to
        ROW_TILE.
        """
        after = b.append_basic_block()
        for most, function in self._variants[:-1]:
            few, more = b.append_basic_block(), b.append_basic_block()
            b.cbranch(b.icmp_signed("<=", rows, i64(most)), few, more)
            b.position_at_end(few)
            b.call(function, arguments)
            b.branch(after)
            b.position_at_end(more)
        b.call(self._variants[-1][1], arguments)
        b.branch(after)
        b.position_at_end(after)


def _amx_matmul(
    module: Value, name: str, steps: int | None, columns: int | None, row: int, out_row: int
) -> Value:
    """Emit out [ROW_TILE, columns] in float32 = rows [ROW_TILE, steps] @ tiles, with AMX.

    For scores, `steps` is constant, `count` is the number of pairs of columns, and results are
    stored. For sums of values, `columns` is constant, `count` is the number of steps, and results
    are added to `out`.

    The function's arguments: (rows, tiles, out, count)
    """
    b, (rows, tiles, out, count) = new_function(module, name, PTR, PTR, PTR, I64)
    tile = {index: ir.Constant(I8, index) for index in range(8)}
    get = declare_intrinsic(module, "llvm.x86.tileloadd64", VOID, I8, PTR, I64)
    put = declare_intrinsic(module, "llvm.x86.tilestored64", VOID, I8, PTR, I64)
    zero = declare_intrinsic(module, "llvm.x86.tilezero", VOID, I8)
    dot = declare_intrinsic(module, "llvm.x86.tdpbf16ps", VOID, I8, I8, I8)

    def step(left: Value, right: list[Value]) -> None:
        for half in (0, 1):
            b.call(get, [tile[4 + half], ptr_add(b, left, half * 16 * row), i64(row)])
        for index, pointer in enumerate(right):
            b.call(get, [tile[6 + index], pointer, i64(CACHE_LINE_BYTES)])
            for half in (0, 1):
                b.call(dot, [tile[2 * index + half], tile[4 + half], tile[6 + index]])

    def results(target: Value, wide: int, intrinsic: Value) -> None:
        for index in range(wide):
            for half in (0, 1):
                pointer = ptr_add(b, target, half * 16 * out_row + index * CACHE_LINE_BYTES)
                b.call(intrinsic, [tile[2 * index + half], pointer, i64(out_row)])

    if steps is not None:
        loop = Loop(b, count)
        for index in range(4):
            b.call(zero, [tile[index]])
        right = ptr_add(b, tiles, mul(b, loop.index, 2 * steps * TILE))
        for i in range(steps):
            both = [ptr_add(b, right, (index * steps + i) * TILE) for index in (0, 1)]
            step(ptr_add(b, rows, i * CACHE_LINE_BYTES), both)
        results(ptr_add(b, out, mul(b, loop.index, 2 * CACHE_LINE_BYTES)), 2, put)
        loop.close()
    else:
        assert columns is not None
        for column in range(0, columns, 2):
            wide = min(2, columns - column)
            results(ptr_add(b, out, column * CACHE_LINE_BYTES), wide, get)
            loop = Loop(b, count)
            right = ptr_add(b, tiles, mul(b, loop.index, columns * TILE))
            both = [ptr_add(b, right, (column + index) * TILE) for index in range(wide)]
            step(ptr_add(b, rows, mul(b, loop.index, CACHE_LINE_BYTES)), both)
            loop.close()
            results(ptr_add(b, out, column * CACHE_LINE_BYTES), wide, put)
    b.ret_void()
    return b.function


def _avx512_matmul(
    module: Value,
    name: str,
    steps: int | None,
    columns: int | None,
    row: int,
    out_row: int,
    *,
    band_rows: int,
    bands: int,
) -> Value:
    """Multiply as `_amx_matmul` does, but with AVX512-BF16 and for `bands` * `band_rows` rows."""
    b, (rows, tiles, out, count) = new_function(module, name, PTR, PTR, PTR, I64)
    dot = declare_intrinsic(
        module, "llvm.x86.avx512bf16.dpbf16ps.512", V16F32, V16F32, V32BF16, V32BF16
    )

    def step(sums: list[Value], left: Value, right: list[Value]) -> list[Value]:
        """Emit the multiplication of one tile: 16 pairs, four per iteration."""
        loop = Loop(b, i64(4), sums)
        sums = list(loop.values)
        for pair in range(4):
            line = b.add(mul(b, loop.index, 4 * CACHE_LINE_BYTES), i64(pair * CACHE_LINE_BYTES))
            each = [
                b.bitcast(load(b, V16I32, one, line, CACHE_LINE_BYTES), V32BF16) for one in right
            ]
            for index in range(band_rows):
                offset = b.add(mul(b, loop.index, 16), i64(index * row + 4 * pair))
                both = b.bitcast(broadcast(b, load(b, I32, left, offset, 4)), V32BF16)
                for wide, one in enumerate(each):
                    at = index * len(right) + wide
                    sums[at] = b.call(dot, [sums[at], both, one])
        loop.close(sums)
        return sums

    def cells(wide: int) -> list[int]:
        return [
            index * out_row + one * CACHE_LINE_BYTES
            for index in range(band_rows)
            for one in range(wide)
        ]

    band = Loop(b, i64(bands))
    band_start = ptr_add(b, rows, mul(b, band.index, band_rows * row))
    target = ptr_add(b, out, mul(b, band.index, band_rows * out_row))
    if steps is not None:
        loop = Loop(b, count)
        sums = [splat(V16F32, 0.0)] * len(cells(2))
        right = ptr_add(b, tiles, mul(b, loop.index, 2 * steps * TILE))
        for each in range(steps):
            both = [ptr_add(b, right, (index * steps + each) * TILE) for index in (0, 1)]
            sums = step(sums, ptr_add(b, band_start, each * CACHE_LINE_BYTES), both)
        at = ptr_add(b, target, mul(b, loop.index, 2 * CACHE_LINE_BYTES))
        for value, cell in zip(sums, cells(2), strict=True):
            store(b, value, at, cell)
        loop.close()
    else:
        assert columns is not None
        for column in range(0, columns, 2):
            wide = min(2, columns - column)
            at = ptr_add(b, target, column * CACHE_LINE_BYTES)
            loop = Loop(
                b, count, [load(b, V16F32, at, cell, CACHE_LINE_BYTES) for cell in cells(wide)]
            )
            right = ptr_add(b, tiles, mul(b, loop.index, columns * TILE))
            both = [ptr_add(b, right, (column + index) * TILE) for index in range(wide)]
            sums = step(
                list(loop.values),
                ptr_add(b, band_start, mul(b, loop.index, CACHE_LINE_BYTES)),
                both,
            )
            loop.close(sums)
            for value, cell in zip(sums, cells(wide), strict=True):
                store(b, value, at, cell)
    band.close()
    b.ret_void()
    return b.function
