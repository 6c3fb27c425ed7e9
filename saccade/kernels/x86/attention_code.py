"""The instructions for attention on x86 processors that multiply bfloat16 numbers, told to LLVM
through llvmlite: by AMX's tiles, or by AVX512-BF16's pairs.

Owns the order in which numbers are loaded, multiplied and added: a row's are those of its own
sequence, in blocks of KEYS from the first on. Unaware of tensors. Imported only to compile, where
llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from llvmlite import ir

from saccade.kernels.x86.attention_call import (
    ABREAST,
    BLOCK,
    CHUNK,
    FIELDS,
    KEYS,
    POINTERS,
    QUERIES,
)
from saccade.kernels.x86.attention_pack import (
    TILE,
    columns_of,
    make_fetch,
    make_find,
    make_pack,
    make_pack_chunk,
    masked_load,
    new_function,
    pack_one,
    packs_its_own,
    steps_of,
    take_piece,
)
from saccade.kernels.x86.llvm import (
    BITS,
    BRAINS,
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LINE,
    MORE_BRAINS,
    PTR,
    SHORTS,
    VOID,
    Claims,
    Loop,
    Value,
    every,
    known,
    load,
    number,
    place,
    spread,
    store,
    times,
)
from saccade.kernels.x86.vnni_call import LANES

Kind = Literal["amx", "pairs"]
EXPONENTIAL = (1.0000026, 0.69300383, 0.24144275, 0.052011464, 0.013534168)
"""2 to the x from 0 to 1, by powers of x: to 2.6e-6 of it."""
SCORES_ROW, WEIGHTS_ROW = KEYS * 4 + LINE, KEYS * 2 + LINE
"""Bytes from one row to the next: a line more, or all would lie in a few sets of the cache."""
LEAST_TOTAL = 1e-30
"""What the weights of a row that sees no keys add up to: it gets zeros."""
WIDE = ir.VectorType(I16, 2 * LANES)
AT_ONCE = 8
"""Rows that AVX512-BF16 multiplies at a time: with two vectors of columns, 16 sums."""
BANDS = ((AT_ONCE // 2, 1), (AT_ONCE, 1), (2 * AT_ONCE, 2), (ABREAST, ABREAST // AT_ONCE))
"""Rows that products are made for, and in how many bands of rows at a time."""


def assembly(triple: str, dim: int, kind: Kind, item: int) -> str:
    """Return LLVM's own text for all functions, for heads with `dim` values.

    item: bytes of a number in keys and values.
    """
    module = ir.Module()
    module.triple = triple
    pack_chunk = make_pack_chunk(module, dim, item)
    make_pack(module, dim, pack_chunk)
    _Attend(module, dim, kind, pack_chunk, make_fetch(module, dim, item))
    return str(module)


def _least(b: Value, one: Value, other: Value) -> Value:
    return b.select(b.icmp_signed("<", one, other), one, other)


def _upwards(b: Value, value: Value, step: int) -> Value:
    """Round up to whole steps. A step is a power of two."""
    return b.and_(b.add(value, number(step - 1)), number(-step))


def _folded(b: Value, row: Value, stride: Value, head: Value, fold: Value) -> Value:
    """Return the bytes to a piece's row. The heads of its fold stand side by side."""
    return b.add(b.mul(b.sdiv(row, fold), stride), b.mul(b.srem(row, fold), head))


class _Attend:
    """The function `attend`: a piece is a block of one head's rows."""

    def __init__(
        self, module: Value, dim: int, kind: Kind, pack_chunk: Value, fetch: Value
    ) -> None:
        self._steps, self._columns = steps, columns = steps_of(dim), columns_of(dim)
        self._strides = q_row, out_row = steps * LINE, columns * LINE
        self._scores, self._adds = (
            _Products(module, kind, *what)
            for what in (
                ("score", steps, None, q_row, SCORES_ROW),
                ("add", None, columns, WEIGHTS_ROW, out_row),
            )
        )
        self._weigh = [_weigh(module, columns, masked) for masked in (False, True)]
        take, give = _take(module, dim), _give(module, dim)
        sizes = (QUERIES * q_row, QUERIES * out_row, ABREAST * SCORES_ROW, ABREAST * WEIGHTS_ROW)
        own_sizes = KEYS // 16 * steps * TILE, KEYS // 32 * columns * TILE, KEYS * 8
        scratch = [*sizes, QUERIES * 4, QUERIES * LINE, *own_sizes]
        task = Claims(module, "attend", FIELDS, POINTERS, scratch)
        *rooms, own_keys, own_values, own_rows = task.scratch
        self._task, self._own_rows = task, own_rows
        self._pack = pack_chunk, make_find(module), fetch
        self._b, self._said, self._rooms = b, said, rooms = task.b, task.said, rooms
        if kind == "amx":
            b.call(known(module, "llvm.x86.ldtilecfg", VOID, PTR), [said["tiles"]])

        def leave() -> None:
            if kind == "amx":
                b.call(known(module, "llvm.x86.tilerelease", VOID), [])

        head, block = take_piece(task, leave)
        at = times(b, block, len(BLOCK) * 8)
        told = {
            name: load(b, I64, said["table"], b.add(at, number(8 * index)), 8)
            for index, name in enumerate(BLOCK)
        }
        fold, head = said["fold"], b.mul(head, said["fold"])
        self._told, count = told, b.mul(told["count"], fold)
        self._count = count
        queries, sums, _, _, tops, totals = rooms
        source, target = (
            place(
                b,
                said[name],
                b.add(b.mul(head, said[f"{name}_head"]), b.mul(told["first"], said[f"{name}_row"])),
            )
            for name in ("q", "out")
        )
        b.call(
            take, [source, said["q_row"], said["q_head"], fold, queries, sums, tops, totals, count]
        )
        self._key_head, self._own = b.sdiv(head, said["group"]), packs_its_own(task)
        self._packed = [
            b.select(self._own, room, said[side])
            for room, side in ((own_keys, "keys"), (own_values, "values"))
        ]
        self._dim = dim
        self._all_keys()
        b.call(give, [target, said["out_row"], said["out_head"], fold, sums, totals, count])
        task.done()

    def _seen(self, row: Value) -> Value:
        """Return how many keys that row of the block sees."""
        b, told = self._b, self._told
        return _least(b, told["keys"], b.add(told["seen"], b.sdiv(row, self._said["fold"])))

    def _all_keys(self) -> None:
        """Take all the block's rows, with all their keys."""
        b, count = self._b, self._count
        most = self._seen(b.sub(count, number(1)))
        chunk = b.add(b.mul(self._key_head, self._said["chunks"]), self._told["chunk"])
        outer = Loop(b, b.sdiv(b.add(most, number(KEYS - 1)), number(KEYS)))
        start = times(b, outer.index, KEYS)
        width = _least(b, b.sub(most, start), number(KEYS))
        with b.if_then(b.and_(self._own, b.icmp_signed(">", width, number(0)))):
            self._pack_own(start, width)
        inner = Loop(b, b.sdiv(b.add(count, number(ABREAST - 1)), number(ABREAST)))
        first = times(b, inner.index, ABREAST)
        last = b.sub(_least(b, count, b.add(first, number(ABREAST))), number(1))
        need = b.sub(self._seen(last), start)
        here = b.add(chunk, times(b, outer.index, KEYS // CHUNK))
        here = b.select(self._own, number(0), here)
        inside, behind = b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed(">", need, number(0)), inside, behind)
        b.position_at_end(inside)
        self._some_keys(here, start, first, _upwards(b, _least(b, need, number(KEYS)), CHUNK))
        b.branch(behind)
        b.position_at_end(behind)
        inner.close()
        outer.close()

    def _pack_own(self, start: Value, width: Value) -> None:
        """Pack `width` of the block's keys from `start` on, in the core's cache.

        While a chunk is packed, the next one is asked for.
        """
        b, said, told = self._b, self._said, self._told
        pack_chunk, find, fetch = self._pack
        width = _upwards(b, width, CHUNK)
        paged = b.icmp_signed("!=", said["page"], number(0))
        with b.if_then(paged):
            pages = place(b, said["pages"], times(b, told["chunk"], 4))
            b.call(find, [pages, said["page"], start, told["keys"], self._own_rows, width])
        listed = place(b, said["rows"], times(b, b.add(times(b, told["chunk"], CHUNK), start), 8))
        rows = b.select(paged, self._own_rows, listed)
        count = b.sdiv(width, number(CHUNK))
        loop = Loop(b, count)
        mine = place(b, rows, times(b, loop.index, CHUNK * 8))
        with b.if_then(b.icmp_signed("<", b.add(loop.index, number(1)), count)):
            for side in "kv":
                lies = place(b, said[side], b.mul(self._key_head, said[f"{side}_head"]))
                b.call(fetch, [place(b, mine, CHUNK * 8), lies, said[f"{side}_row"]])
        pack_one(self._task, pack_chunk, self._dim, self._key_head, mine, loop.index, self._packed)
        loop.close()

    def _some_keys(self, chunk: Value, start: Value, first: Value, width: Value) -> None:
        """Take ABREAST rows from `first` on, or those that are left, with `width` keys from `start`
        on.
        """
        b, (q_row, out_row) = self._b, self._strides
        rows = _least(b, b.sub(self._count, first), number(ABREAST))
        queries, sums, scores, weights, tops, totals = self._rooms
        sizes = CHUNK // 16 * self._steps * TILE, CHUNK // 32 * self._columns * TILE
        keys, values = (
            place(b, packed, times(b, chunk, size)) for packed, size in zip(self._packed, sizes)
        )
        pairs = b.sdiv(width, number(32))
        self._scores(b, rows, [place(b, queries, times(b, first, q_row)), keys, scores, pairs])
        each = Loop(b, rows)
        row = b.add(first, each.index)
        valid = b.sub(self._seen(row), start)
        valid = _least(b, valid, width)
        valid = b.select(b.icmp_signed(">", valid, number(0)), valid, number(0))
        arguments = [
            place(b, scores, times(b, each.index, SCORES_ROW)),
            place(b, weights, times(b, each.index, WEIGHTS_ROW)),
            place(b, tops, times(b, row, 4)),
            place(b, totals, times(b, row, LINE)),
            place(b, sums, times(b, row, out_row)),
            self._said["factor"],
            width,
            valid,
        ]
        with b.if_else(b.icmp_signed("==", valid, width)) as ways:
            for way, function in zip(ways, self._weigh):
                with way:
                    b.call(function, arguments)
        each.close()
        self._adds(b, rows, [weights, values, place(b, sums, times(b, first, out_row)), pairs])


def _take(module: Value, dim: int) -> Value:
    """Make a function that copies queries in, and resets sums, totals and tops.

    Arguments: (source, its row, its head, fold, queries, sums, tops, totals, count). Writes whole
    blocks of rows. Sums and totals begin at 0.
    """
    b, arguments = new_function(module, "take", PTR, I64, I64, I64, PTR, PTR, PTR, PTR, I64)
    source, stride, head, fold, queries, sums, tops, totals, count = arguments
    steps, columns = steps_of(dim), columns_of(dim)
    loop = Loop(b, _upwards(b, count, AT_ONCE))
    # Rows beyond are the last one again: they are scored, and thrown away.
    row = _least(b, loop.index, b.sub(count, number(1)))
    start = place(b, source, _folded(b, row, stride, head, fold))
    for step in range(steps):
        some = masked_load(b, module, place(b, start, LINE * step), dim - 32 * step, 32)
        store(b, some, queries, b.add(times(b, loop.index, steps * LINE), number(step * LINE)))
    for column in range(columns):
        where = b.add(times(b, loop.index, columns * LINE), number(column * LINE))
        store(b, every(FLOATS, 0.0), sums, where)
    store(b, every(FLOATS, 0.0), totals, times(b, loop.index, LINE))
    store(b, ir.Constant(F32, float("-inf")), tops, times(b, loop.index, 4))
    loop.close()
    b.ret_void()
    return b.function


def _give(module: Value, dim: int) -> Value:
    """Make a function that writes means in bfloat16.

    Arguments: (target, its row, its head, fold, sums, totals, count)
    """
    b, arguments = new_function(module, "give", PTR, I64, I64, I64, PTR, PTR, I64)
    target, stride, head, fold, sums, totals, count = arguments
    columns = columns_of(dim)
    loop = Loop(b, count)
    total = load(b, FLOATS, totals, times(b, loop.index, LINE), LINE)
    total = _across(b, total, b.fadd)
    least = every(FLOATS, LEAST_TOTAL)
    total = b.select(b.fcmp_ordered("<", total, least), least, total)
    share = b.fdiv(every(FLOATS, 1.0), total)
    start = place(b, target, _folded(b, loop.index, stride, head, fold))
    narrow = known(module, "llvm.x86.avx512bf16.cvtneps2bf16.512", BRAINS, FLOATS)
    bits = BITS
    keep = known(module, "llvm.masked.store.v16i16.p0", VOID, SHORTS, PTR, I32, bits)
    for column in range(columns):
        where = b.add(times(b, loop.index, columns * LINE), number(column * LINE))
        mean = b.fmul(load(b, FLOATS, sums, where, LINE), share)
        made = b.bitcast(b.call(narrow, [mean]), SHORTS)
        mask = ir.Constant(bits, [column * 16 + lane < dim for lane in range(16)])
        b.call(keep, [made, place(b, start, 32 * column), ir.Constant(I32, 2), mask])
    loop.close()
    b.ret_void()
    return b.function


def _across(b: Value, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
    """Join all lanes, and put the result into each lane."""
    for size in (8, 4, 2, 1):
        lanes = ir.Constant(INTS, [lane ^ size for lane in range(LANES)])
        vector = join(vector, b.shuffle_vector(vector, vector, lanes))
    return vector


class _Exponential:
    """2 to the x, for vectors with values at most a little above 0."""

    def __init__(self, module: Value, b: Value) -> None:
        self._b = b
        mask, fma = [FLOATS, I16, I32], f"llvm.fma.v{LANES}f32"
        self._reduce = known(
            module, "llvm.x86.avx512.mask.reduce.ps.512", FLOATS, FLOATS, I32, *mask
        )
        self._scale = known(
            module, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, FLOATS, *mask[:1], *mask
        )
        self.fma = known(module, fma, FLOATS, FLOATS, FLOATS, FLOATS)
        self._more = [every(FLOATS, 0.0), ir.Constant(I16, -1), ir.Constant(I32, 4)]

    def __call__(self, x: Value) -> Value:
        b = self._b
        part = b.call(self._reduce, [x, ir.Constant(I32, 1), *self._more])  # x - floor(x)
        *others, power = EXPONENTIAL
        power = every(FLOATS, power)
        for each in reversed(others):
            power = b.call(self.fma, [power, part, every(FLOATS, each)])
        return b.call(self._scale, [power, x, *self._more])


def _weigh(module: Value, columns: int, masked: bool) -> Value:
    """Make a function that weighs these keys for one row.

    It also rescales what the row has summed before to its largest score now.

    Arguments: (scores, weights, top, total, sum, factor, width, valid). masked: keys from `valid`
    on weigh 0.
    """
    name = "weigh_some" if masked else "weigh_all"
    b, arguments = new_function(module, name, PTR, PTR, PTR, PTR, PTR, I64, I64, I64)
    b.function.attributes.add("noinline")
    scores, weights, top, total, sum_, factor, width, valid = arguments
    power = _Exponential(module, b)
    largest = known(module, "llvm.x86.avx512.max.ps.512", FLOATS, FLOATS, FLOATS, I32)

    def most(one: Value, other: Value) -> Value:
        return b.call(largest, [one, other, ir.Constant(I32, 4)])

    factor = spread(b, b.bitcast(b.trunc(factor, I32), F32))
    lanes = ir.Constant(INTS, list(range(LANES)))

    def read(chunk: Value, part: int) -> Value:
        where = b.add(times(b, chunk, CHUNK * 4), number(part * LINE))
        value = load(b, FLOATS, scores, where, LINE)
        if not masked:
            return value
        left = b.trunc(b.sub(valid, b.add(times(b, chunk, CHUNK), number(part * LANES))), I32)
        there = b.icmp_signed("<", lanes, spread(b, left))
        return b.select(there, value, every(FLOATS, float("-inf")))

    chunks = b.sdiv(width, number(CHUNK))
    parts = CHUNK // LANES
    loop = Loop(b, chunks, [every(FLOATS, float("-inf"))] * parts)
    one, two, three, four = found = [
        most(read(loop.index, part), loop.values[part]) for part in range(parts)
    ]
    loop.close(found)
    found = _across(b, most(most(one, two), most(three, four)), most)
    before = spread(b, load(b, F32, top, 0, 4))
    now = most(found, before)
    less = b.fneg(b.fmul(now, factor))
    loop = Loop(b, chunks, [every(FLOATS, 0.0)] * parts)
    each = [
        power(b.call(power.fma, [read(loop.index, part), factor, less])) for part in range(parts)
    ]
    narrow = known(module, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", MORE_BRAINS, FLOATS, FLOATS)
    for two in range(0, parts, 2):
        both = b.bitcast(b.call(narrow, [each[two + 1], each[two]]), WIDE)
        store(b, both, weights, b.add(times(b, loop.index, CHUNK * 2), number(two * LINE // 2)))
    one, two, three, four = added = [b.fadd(value, more) for value, more in zip(loop.values, each)]
    loop.close(added)
    made = b.fadd(b.fadd(one, two), b.fadd(three, four))
    b.store(b.extract_element(now, ir.Constant(I32, 0)), top, align=4)
    share = power(b.call(power.fma, [before, factor, less]))
    _settle(b, power.fma, b.fcmp_unordered("!=", now, before), share, made, total, sum_, columns)
    return b.function


def _settle(
    b: Value,
    fma: Value,
    changed: Value,
    share: Value,
    made: Value,
    total: Value,
    sum_: Value,
    columns: int,
) -> None:
    """Add these weights to the row's total.

    If the largest score changed, the total and the sum from before are rescaled by `share`.
    """
    kept = load(b, FLOATS, total, 0, LINE)
    new, old = b.append_basic_block(), b.append_basic_block()
    b.cbranch(b.extract_element(changed, ir.Constant(I32, 0)), new, old)
    b.position_at_end(new)
    store(b, b.call(fma, [kept, share, made]), total)
    for column in range(columns):
        value = load(b, FLOATS, sum_, column * LINE, LINE)
        store(b, b.fmul(value, share), sum_, column * LINE)
    b.ret_void()
    b.position_at_end(old)
    store(b, b.fadd(kept, made), total)
    b.ret_void()


class _Products:
    """Products of a band of rows with packed tiles, by the least work that covers the band.

    Rows have the same bits in each: every number is added in the same order.
    """

    def __init__(
        self,
        module: Value,
        kind: Kind,
        name: str,
        steps: int | None,
        columns: int | None,
        row: int,
        out_row: int,
    ) -> None:
        sides = steps, columns, row, out_row
        self._ways: list[tuple[int, Value]] = []  # most rows, and the function for so many
        if kind == "amx":
            self._ways = [(ABREAST, _tiles(module, name, *sides))]
            return
        for most, bands in BANDS:
            function = _pairs(module, f"{name}_{most}", *sides, at_once=most // bands, bands=bands)
            self._ways.append((most, function))

    def __call__(self, b: Value, rows: Value, arguments: Sequence[Value]) -> None:
        """Multiply the first `rows` rows, at most ABREAST, and perhaps more up to ABREAST."""
        behind = b.append_basic_block()
        for most, function in self._ways[:-1]:
            few, more = b.append_basic_block(), b.append_basic_block()
            b.cbranch(b.icmp_signed("<=", rows, number(most)), few, more)
            b.position_at_end(few)
            b.call(function, arguments)
            b.branch(behind)
            b.position_at_end(more)
        b.call(self._ways[-1][1], arguments)
        b.branch(behind)
        b.position_at_end(behind)


def _tiles(
    module: Value, name: str, steps: int | None, columns: int | None, row: int, out_row: int
) -> Value:
    """Make out [ABREAST, columns] in float32 = rows [ABREAST, steps] times tiles, by AMX.

    For scores the `steps` are known, and columns are counted in pairs; results are written. For
    sums the columns are known, and results are added.

    Arguments: (rows, tiles, out, count)
    """
    b, (rows, tiles, out, count) = new_function(module, name, PTR, PTR, PTR, I64)
    tile = {index: ir.Constant(I8, index) for index in range(8)}
    get = known(module, "llvm.x86.tileloadd64", VOID, I8, PTR, I64)
    put = known(module, "llvm.x86.tilestored64", VOID, I8, PTR, I64)
    zero = known(module, "llvm.x86.tilezero", VOID, I8)
    dot = known(module, "llvm.x86.tdpbf16ps", VOID, I8, I8, I8)

    def step(left: Value, right: list[Value]) -> None:
        for half in (0, 1):
            b.call(get, [tile[4 + half], place(b, left, half * 16 * row), number(row)])
        for index, pointer in enumerate(right):
            b.call(get, [tile[6 + index], pointer, number(LINE)])
            for half in (0, 1):
                b.call(dot, [tile[2 * index + half], tile[4 + half], tile[6 + index]])

    def results(at: Value, wide: int, what: Value) -> None:
        for index in range(wide):
            for half in (0, 1):
                where = place(b, at, half * 16 * out_row + index * LINE)
                b.call(what, [tile[2 * index + half], where, number(out_row)])

    if steps is not None:
        loop = Loop(b, count)
        for index in range(4):
            b.call(zero, [tile[index]])
        right = place(b, tiles, times(b, loop.index, 2 * steps * TILE))
        for each in range(steps):
            both = [place(b, right, (index * steps + each) * TILE) for index in (0, 1)]
            step(place(b, rows, each * LINE), both)
        results(place(b, out, times(b, loop.index, 2 * LINE)), 2, put)
        loop.close()
    else:
        assert columns is not None
        for column in range(0, columns, 2):
            wide = min(2, columns - column)
            results(place(b, out, column * LINE), wide, get)
            loop = Loop(b, count)
            right = place(b, tiles, times(b, loop.index, columns * TILE))
            both = [place(b, right, (column + index) * TILE) for index in range(wide)]
            step(place(b, rows, times(b, loop.index, LINE)), both)
            loop.close()
            results(place(b, out, column * LINE), wide, put)
    b.ret_void()
    return b.function


def _pairs(
    module: Value,
    name: str,
    steps: int | None,
    columns: int | None,
    row: int,
    out_row: int,
    *,
    at_once: int,
    bands: int,
) -> Value:
    """Do as `_tiles`, by AVX512-BF16, for `bands` times `at_once` rows."""
    b, (rows, tiles, out, count) = new_function(module, name, PTR, PTR, PTR, I64)
    dot = known(
        module, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, FLOATS, MORE_BRAINS, MORE_BRAINS
    )

    def step(sums: list[Value], left: Value, right: list[Value]) -> list[Value]:
        """Multiply one tile: 16 pairs, four per iteration."""
        loop = Loop(b, number(4), sums)
        sums = list(loop.values)
        for pair in range(4):
            line = b.add(times(b, loop.index, 4 * LINE), number(pair * LINE))
            each = [b.bitcast(load(b, INTS, one, line, LINE), MORE_BRAINS) for one in right]
            for index in range(at_once):
                where = b.add(times(b, loop.index, 16), number(index * row + 4 * pair))
                both = b.bitcast(spread(b, load(b, I32, left, where, 4)), MORE_BRAINS)
                for wide, one in enumerate(each):
                    at = index * len(right) + wide
                    sums[at] = b.call(dot, [sums[at], both, one])
        loop.close(sums)
        return sums

    def cells(wide: int) -> list[int]:
        return [index * out_row + one * LINE for index in range(at_once) for one in range(wide)]

    band = Loop(b, number(bands))
    mine = place(b, rows, times(b, band.index, at_once * row))
    target = place(b, out, times(b, band.index, at_once * out_row))
    if steps is not None:
        loop = Loop(b, count)
        sums = [every(FLOATS, 0.0)] * len(cells(2))
        right = place(b, tiles, times(b, loop.index, 2 * steps * TILE))
        for each in range(steps):
            both = [place(b, right, (index * steps + each) * TILE) for index in (0, 1)]
            sums = step(sums, place(b, mine, each * LINE), both)
        at = place(b, target, times(b, loop.index, 2 * LINE))
        for value, cell in zip(sums, cells(2), strict=True):
            store(b, value, at, cell)
        loop.close()
    else:
        assert columns is not None
        for column in range(0, columns, 2):
            wide = min(2, columns - column)
            at = place(b, target, column * LINE)
            loop = Loop(b, count, [load(b, FLOATS, at, cell, LINE) for cell in cells(wide)])
            right = place(b, tiles, times(b, loop.index, columns * TILE))
            both = [place(b, right, (column + index) * TILE) for index in range(wide)]
            sums = step(list(loop.values), place(b, mine, times(b, loop.index, LINE)), both)
            loop.close(sums)
            for value, cell in zip(sums, cells(wide), strict=True):
                store(b, value, at, cell)
    band.close()
    b.ret_void()
    return b.function
