"""The instructions for products with 4- and 8-bit matrices on x86 processors with AVX512-VNNI, told
to LLVM through llvmlite.

Owns the order in which numbers are loaded, multiplied and added. Leaves tensors to
`vnni_layout.py`, which lays them out. Imported only to compile, where llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llvmlite import ir

from saccade.kernels.x86.llvm import (
    BYTES,
    F32,
    FLOATS,
    HALVES,
    I8,
    I32,
    I64,
    INTS,
    LINE,
    PTR,
    SHORTS,
    VOID,
    Claims,
    Keep,
    Loop,
    Value,
    every,
    known,
    least,
    load,
    number,
    place,
    spread,
    store,
    times,
)
from saccade.kernels.x86.vnni_call import (
    AHEAD_BYTES,
    FIELDS,
    FORMATS,
    LANES,
    LARGEST,
    LEAST_SCALE,
    POINTERS,
    PRODUCT,
    QUANTISE,
    ROWS,
    TILE_INPUTS,
    TILE_PANELS,
    TILE_ROWS,
    TILED,
    WIDE,
    ZERO,
)

UNROLLED = 4
"""Lines of each vector of outputs that are multiplied between two tests of the loop."""
PANEL = LANES * WIDE
"""Outputs that are a piece of work."""


def assembly(triple: str, names: Iterable[str]) -> str:
    """Return LLVM's own text for the functions with these names."""
    module = ir.Module()
    module.triple = triple
    for name in names:
        if name in QUANTISE:
            _quantise(module, name, *QUANTISE[name])
        elif name in PRODUCT:
            _product(module, PRODUCT[name])
        else:
            assert name == TILED
            _product_tiled(module)
    return str(module)


def _tile(b: Value, said: dict[str, Value], index: Value) -> tuple[Value, Value]:
    """Return (the first row, how many) for a tile. The first `extra` tiles have `base` + 1."""
    longer = b.icmp_signed("<", index, said["extra"])
    before = b.select(longer, index, said["extra"])
    count = b.add(said["base"], b.zext(longer, I64))
    return b.add(b.mul(index, said["base"]), before), count


def _inputs(b: Value, said: dict[str, Value], bits: int) -> tuple[Value, Value]:
    """Return how many inputs a group has, and how many there are in all."""
    group = times(b, said["steps"], UNROLLED * 4 * 8 // bits)
    return group, b.mul(group, said["groups"])


def _quantise(module: Value, name: str, bits: int, block: int) -> None:
    """Quantise rows to int8, each group by its own largest value. A piece is a tile.

    block: inputs that Hadamard's transform joins before. A single vector stays as it is.
    """
    task = Claims(module, name, FIELDS, POINTERS)
    b, said = task.b, task.said
    wides = block // LANES
    row = {
        kind: _quantise_row(module, f"{name}_row_{kind}", bits, kind, wides)
        for kind in range(len(FORMATS))
    }
    tile = task.take_piece(said["tiles"])
    first, count = _tile(b, said, tile)
    group, inputs = _inputs(b, said, bits)
    before = times(b, first, said["groups"], 4)
    rows = place(b, said["rows"], b.mul(first, inputs))
    scales, sums = (place(b, said[name], before) for name in ("row_scales", "sums"))
    loop = Loop(b, count)
    values = times(b, b.add(first, loop.index), inputs)
    lane = times(b, loop.index, 4)
    *blocks, behind = task.choose(said["format"], [number(kind) for kind in row])
    for (kind, function), block in zip(row.items(), blocks):
        b.position_at_end(block)
        source = place(b, said["source"], times(b, values, 2 if kind else 4))
        targets = [place(b, pointer, lane) for pointer in (rows, scales, sums)]
        sizes = [times(b, count, 4), said["groups"], group]
        b.call(function, [source, *targets, *sizes, said["unit"]])
        b.branch(behind)
    b.position_at_end(behind)
    loop.close()
    task.done()


def _quantise_row(module: Value, name: str, bits: int, kind: int, wides: int) -> Value:
    """Make a function that quantises one row. wides: vectors that are transformed together.

    Arguments: (source, numbers, scales, sums, bytes between a row's words, groups, inputs per
    group, unit)
    """
    signature = ir.FunctionType(VOID, [PTR] * 4 + [I64] * 4)
    function = ir.Function(module, signature, name)
    function.linkage = "internal"
    source, numbers, scales, sums, stride, groups, group, unit = function.args
    b = ir.IRBuilder(function.append_basic_block())
    unit = b.bitcast(b.trunc(unit, I32), F32)
    item = 2 if kind else 4
    turns = b.udiv(group, number(wides * LANES))
    outer = Loop(b, groups, [source, numbers])
    source, numbers = outer.values

    def read(turn: Value) -> list[Value]:
        start = times(b, turn, wides * LANES * item)
        places = [place(b, source, b.add(start, number(i * LANES * item))) for i in range(wides)]
        return _read_block(module, b, kind, places) if wides > 1 else [_widened(b, kind, *places)]

    larger = known(module, f"llvm.umax.v{LANES}i32", INTS, INTS, INTS)
    loop = Loop(b, turns, [every(INTS, 0)])
    (most,) = loop.values
    for wide in read(loop.index):
        # Of positive numbers, the larger has the larger bits; and what is no number larger still.
        size = b.and_(b.bitcast(wide, INTS), every(INTS, 0x7FFFFFFF))
        most = b.call(larger, [most, size])
    loop.close([most])
    reduce = known(module, f"llvm.vector.reduce.umax.v{LANES}i32", I32, INTS)
    scale = b.fdiv(b.bitcast(b.call(reduce, [most]), F32), ir.Constant(F32, LARGEST))
    small = b.fcmp_ordered("<", scale, ir.Constant(F32, LEAST_SCALE))
    scale = b.select(small, ir.Constant(F32, LEAST_SCALE), scale)
    divisor = spread(b, scale)
    loop = Loop(b, turns, [every(INTS, 0), numbers])
    total, spot = loop.values
    rint = known(module, f"llvm.rint.v{LANES}f32", FLOATS, FLOATS)
    for wide in read(loop.index):
        whole = b.fptosi(b.call(rint, [b.fdiv(wide, divisor)]), INTS)
        words = b.bitcast(b.trunc(whole, BYTES), ir.VectorType(I32, 4))
        for word in range(4):
            store(b, b.extract_element(words, ir.Constant(I32, word)), spot)
            spot = place(b, spot, stride)
        total = b.add(total, whole)
    loop.close([total, spot])
    add = known(module, f"llvm.vector.reduce.add.v{LANES}i32", I32, INTS)
    weight = ir.Constant(I32, -1 if bits == 4 else -ZERO)
    where = times(b, outer.index, stride)
    store(b, b.fmul(scale, unit), scales, where)
    store(b, b.mul(b.call(add, [total]), weight), sums, where)
    outer.close([place(b, source, times(b, group, item)), spot])
    b.ret_void()
    return function


def _read_block(module: Value, b: Value, kind: int, places: list[Value]) -> list[Value]:
    """Load a block's vectors, transformed as `reference/hadamard.py` does to the bit.

    Half by half: a large block's vectors are more than a processor's registers.
    """
    if len(places) == 1:
        return [_transformed(module, b, _widened(b, kind, places[0]))]
    half = len(places) // 2
    first = _read_block(module, b, kind, places[:half])
    pairs = [*zip(first, _read_block(module, b, kind, places[half:]))]
    return [*[b.fadd(*pair) for pair in pairs], *[b.fsub(*pair) for pair in pairs]]


def _transformed(module: Value, b: Value, wide: Value) -> Value:
    """Transform the values of one vector."""
    add = known(module, f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS)
    step = 1
    while step < LANES:
        swap = ir.Constant(INTS, [lane ^ step for lane in range(LANES)])
        signs = ir.Constant(FLOATS, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        wide = b.call(add, [wide, signs, b.shuffle_vector(wide, wide, swap)])
        step *= 2
    return wide


def _widened(b: Value, kind: int, pointer: Value) -> Value:
    """Load a vector in one of FORMATS as float32."""
    if kind == 0:
        return load(b, FLOATS, pointer)
    if kind == 1:
        raised = b.shl(b.zext(load(b, SHORTS, pointer), INTS), every(INTS, 16))
        return b.bitcast(raised, FLOATS)
    return b.fpext(load(b, HALVES, pointer), FLOATS)


def _product(module: Value, bits: int) -> None:
    """Make the product. A piece is a panel of outputs, for all rows."""
    tiles = [_multiply(module, bits, rows) for rows in range(1, ROWS + 1)]
    ends = {kind: _finish(module, kind, bits) for kind in range(len(FORMATS))}
    task = Claims(module, f"product_{bits}", FIELDS, POINTERS, [ROWS * WIDE * LINE])
    b, said = task.b, task.said
    outputs, groups = said["outputs"], said["groups"]
    count = b.lshr(b.add(outputs, number(PANEL - 1)), number(5))
    assert PANEL == 1 << 5
    panel = task.take_piece(count)
    _, inputs = _inputs(b, said, bits)
    first = times(b, panel, PANEL)
    values = times(b, first, groups)
    words = place(b, said["words"], b.lshr(times(b, first, inputs, bits), number(3)))
    scales = place(b, said["scales"], times(b, values, 2 if bits == 4 else 4))
    zeros = place(b, said["zeros"], times(b, values, 2))
    loop = Loop(b, said["tiles"])
    row, rows = _tile(b, said, loop.index)
    before = times(b, row, groups, 4)
    inside = [place(b, said["rows"], b.mul(row, inputs))]
    inside += [place(b, said[name], before) for name in ("row_scales", "sums")]
    *blocks, behind = task.choose(rows, [number(rows) for rows in range(1, ROWS + 1)])
    for function, block in zip(tiles, blocks):
        b.position_at_end(block)
        b.call(function, [words, scales, zeros, *inside, task.scratch[0], groups, said["steps"]])
        b.branch(behind)
    b.position_at_end(behind)
    each = Loop(b, rows)
    made = place(b, task.scratch[0], times(b, each.index, WIDE * LINE))
    at = b.add(times(b, b.add(row, each.index), outputs), first)
    bias = place(b, said["bias"], times(b, first, 4))
    *blocks, behind = task.choose(said["format"], [number(kind) for kind in ends])
    for (kind, function), block in zip(ends.items(), blocks):
        b.position_at_end(block)
        target = place(b, said["result"], times(b, at, 2 if kind else 4))
        b.call(function, [made, bias, target, b.sub(outputs, first)])
        b.branch(behind)
    b.position_at_end(behind)
    each.close()
    loop.close()
    task.done()


def _product_tiled(module: Value) -> None:
    """Make `product_8` for `base` rows one behind another, in `tiles` blocks of TILE_ROWS.

    A piece is TILE_PANELS panels. Sums are whole numbers: bits are the same as from `product_8`.
    """
    task = Claims(module, TILED, FIELDS, POINTERS, [TILE_ROWS * WIDE * LINE])
    b, said = task.b, task.said
    multiply = _multiply_tiled(module)
    settle = {kind: _settle_tiled(module, kind) for kind in range(len(FORMATS))}
    (sums,) = task.scratch
    b.call(known(module, "llvm.x86.ldtilecfg", VOID, PTR), [said["tile_setting"]])
    outputs = said["outputs"]
    panels = b.lshr(b.add(outputs, number(PANEL - 1)), number(5))
    pieces = b.udiv(b.add(panels, number(TILE_PANELS - 1)), number(TILE_PANELS))
    leave = known(module, "llvm.x86.tilerelease", VOID)
    piece = task.take_piece(pieces, lambda: b.call(leave, []))
    _, inputs = _inputs(b, said, 8)
    start = times(b, piece, TILE_PANELS)
    outer = Loop(b, said["tiles"])
    before = times(b, outer.index, TILE_ROWS)
    rows = least(b, b.sub(said["base"], before), number(TILE_ROWS))
    left = place(b, said["rows"], b.mul(before, inputs))
    inner = Loop(b, least(b, b.sub(panels, start), number(TILE_PANELS)))
    first = times(b, b.add(start, inner.index), PANEL)
    right = place(b, said["words"], b.mul(first, inputs))
    b.call(multiply, [left, right, sums, inputs])
    row_facts = [place(b, said[name], times(b, before, 4)) for name in ("sums", "row_scales")]
    panel_facts = [place(b, said[name], times(b, first, 4)) for name in ("scales", "bias")]
    at = b.add(times(b, before, outputs), first)
    *blocks, behind = task.choose(said["format"], [number(kind) for kind in settle])
    for (kind, function), block in zip(settle.items(), blocks):
        b.position_at_end(block)
        target = place(b, said["result"], times(b, at, 2 if kind else 4))
        sizes = [rows, outputs, b.sub(outputs, first)]
        b.call(function, [sums, *row_facts, *panel_facts, target, *sizes])
        b.branch(behind)
    b.position_at_end(behind)
    inner.close()
    outer.close()
    task.done()


def _settle_tiled(module: Value, kind: int) -> Value:
    """Write the sums of a block and a panel, scaled, in one of FORMATS.

    Arguments: (sums, what to take from each row, rows' scales, outputs' scales, bias, target, how
    many rows, outputs in the result, how many are left from here)
    """
    signature = ir.FunctionType(VOID, [PTR] * 6 + [I64] * 3)
    function = ir.Function(module, signature, f"settle_tiled_{kind}")
    function.linkage = "internal"
    sums, less, turns, scales, bias, target, rows, outputs, left = function.args
    b = ir.IRBuilder(function.append_basic_block())
    factors, added = (
        [load(b, FLOATS, pointer, wide * LINE) for wide in range(WIDE)]
        for pointer in (scales, bias)
    )
    keep = Keep(module, b, kind, left, WIDE)
    add = known(module, f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS)
    loop = Loop(b, rows)
    row = times(b, loop.index, 4)
    minus, turn = spread(b, load(b, I32, less, row, 4)), spread(b, load(b, F32, turns, row, 4))
    made = place(b, sums, times(b, loop.index, WIDE * LINE))
    where = place(b, target, times(b, loop.index, outputs, 2 if kind else 4))
    for wide in range(WIDE):
        total = b.sitofp(b.add(load(b, INTS, made, wide * LINE), minus), FLOATS)
        value = b.call(add, [b.fmul(total, factors[wide]), turn, every(FLOATS, 0.0)])
        keep.write(b.fadd(value, added[wide]), where, wide)
    loop.close()
    b.ret_void()
    return function


def _multiply_tiled(module: Value) -> Value:
    """Make sums[TILE_ROWS, PANEL] = rows [TILE_ROWS, inputs] times a panel, in whole numbers.

    Arguments: (rows, panel, sums, inputs)
    """
    function = ir.Function(module, ir.FunctionType(VOID, [PTR, PTR, PTR, I64]), "multiply_tiled")
    function.linkage = "internal"
    rows, panel, sums, inputs = function.args
    b = ir.IRBuilder(function.append_basic_block())
    tile = [ir.Constant(I8, index) for index in range(8)]
    get = known(module, "llvm.x86.tileloadd64", VOID, I8, PTR, I64)
    put = known(module, "llvm.x86.tilestored64", VOID, I8, PTR, I64)
    zero = known(module, "llvm.x86.tilezero", VOID, I8)
    dot = known(module, "llvm.x86.tdpbsud", VOID, I8, I8, I8)  # numbers of rows have signs
    halves = range(2)
    for index in range(4):
        b.call(zero, [tile[index]])
    loop = Loop(b, b.lshr(inputs, number(6)))
    assert TILE_INPUTS == 1 << 6
    for half in halves:
        where = b.add(times(b, inputs, 16 * half), times(b, loop.index, TILE_INPUTS))
        b.call(get, [tile[4 + half], place(b, rows, where), inputs])
    for wide in range(WIDE):
        where = b.add(times(b, loop.index, 16 * WIDE * LINE), number(wide * LINE))
        b.call(get, [tile[6 + wide], place(b, panel, where), number(WIDE * LINE)])
        for half in halves:
            b.call(dot, [tile[2 * wide + half], tile[4 + half], tile[6 + wide]])
    loop.close()
    for wide in range(WIDE):
        for half in halves:
            where = place(b, sums, half * 16 * WIDE * LINE + wide * LINE)
            b.call(put, [tile[2 * wide + half], where, number(WIDE * LINE)])
    b.ret_void()
    return function


def _multiply(module: Value, bits: int, rows: int) -> Value:
    """Make made[rows, PANEL], the products of this many rows with a panel.

    Arguments: (words, scales, zeros, rows, row_scales, sums, made, groups, steps)
    """
    signature = ir.FunctionType(VOID, [PTR] * 7 + [I64] * 2)
    function = ir.Function(module, signature, f"multiply_{bits}_{rows}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    words, scales, zeros, numbers, row_scales, sums, made, groups, steps = function.args
    b = ir.IRBuilder(function.append_basic_block())
    cells = [(row, wide) for row in range(rows) for wide in range(WIDE)]
    for cell in range(len(cells)):
        store(b, every(FLOATS, 0.0), made, cell * LINE)
    outer = Loop(b, groups, [words, numbers])
    lanes = [b.add(times(b, outer.index, PANEL), number(LANES * wide)) for wide in range(WIDE)]
    starts = [times(b, b.add(times(b, outer.index, rows), number(row)), 4) for row in range(rows)]
    less = [spread(b, load(b, I32, sums, start, 4)) for start in starts]
    begun = [every(INTS, 0) if bits == 4 else less[row] for row, _ in cells]
    # One row alone has two sums of each vector of outputs: one would wait for itself.
    begun += [every(INTS, 0)] * (WIDE if rows == 1 else 0)
    inner = Loop(b, steps, [*begun, *outer.values])
    totals, after = _step(module, b, bits, rows, inner.values)
    inner.close([*totals, *after])
    if rows == 1:
        totals = [b.add(total, more) for total, more in zip(totals, totals[WIDE:])]
    # a * b + c, rounded once
    add = known(module, f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS)
    item, kind = (2, HALVES) if bits == 4 else (4, FLOATS)
    factors = [load(b, kind, scales, times(b, lane, item)) for lane in lanes]
    wholes = [b.sitofp(total, FLOATS) for total in totals]
    if bits == 4:
        factors = [b.fpext(factor, FLOATS) for factor in factors]
        points = [b.fpext(load(b, HALVES, zeros, times(b, lane, 2)), FLOATS) for lane in lanes]
        minus = [b.sitofp(each, FLOATS) for each in less]
        wholes = [
            b.call(add, [minus[row], points[wide], whole])
            for whole, (row, wide) in zip(wholes, cells)
        ]
    turns = [spread(b, load(b, F32, row_scales, start, 4)) for start in starts]
    for cell, (row, wide) in enumerate(cells):
        scaled = b.fmul(wholes[cell], factors[wide])
        before = load(b, FLOATS, made, cell * LINE)
        store(b, b.call(add, [scaled, turns[row], before]), made, cell * LINE)
    outer.close(after)
    b.ret_void()
    return function


def _step(
    module: Value, b: Value, bits: int, rows: int, carried: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Multiply UNROLLED lines for each vector of outputs.

    Returns the sums, and [words, rows] behind.
    """
    dot = known(module, "llvm.x86.avx512.vpdpbusd.512", INTS, INTS, INTS, INTS)
    fetch = known(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    how = [ir.Constant(I32, value) for value in (0, 2, 1)]  # read, to the second cache, data
    *totals, words, numbers = carried
    line, word = 0, 0
    for turn in range(UNROLLED):
        parts = []
        b.call(fetch, [place(b, words, line + AHEAD_BYTES), *how])  # its neighbour comes with it
        for _ in range(WIDE):
            loaded = load(b, INTS, words, line, LINE)
            line += LINE
            low = b.and_(loaded, every(INTS, 0x0F0F0F0F))
            high = b.and_(b.lshr(loaded, every(INTS, 4)), every(INTS, 0x0F0F0F0F))
            parts.append([low, high] if bits == 4 else [loaded])
        for half in range(8 // bits):
            other = rows == 1 and (turn * (8 // bits) + half) % 2
            for row in range(rows):
                four = spread(b, load(b, I32, numbers, word, 4))
                word += 4
                for wide in range(WIDE):
                    cell = row * WIDE + wide + (WIDE if other else 0)
                    totals[cell] = b.call(dot, [totals[cell], parts[wide][half], four])
    return totals, [place(b, words, line), place(b, numbers, word)]


def _finish(module: Value, kind: int, bits: int) -> Value:
    """Make a function that writes one row's panel in one of FORMATS.

    Arguments: (made, bias, target, how many outputs there are from here)
    """
    signature = ir.FunctionType(VOID, [PTR, PTR, PTR, I64])
    function = ir.Function(module, signature, f"finish_{bits}_{kind}")
    function.linkage = "internal"
    made, bias, target, left = function.args
    b = ir.IRBuilder(function.append_basic_block())
    keep = Keep(module, b, kind, left, WIDE)
    for wide in range(WIDE):
        added = b.fadd(load(b, FLOATS, made, wide * LINE), load(b, FLOATS, bias, wide * LINE))
        keep.write(added, target, wide)
    b.ret_void()
    return function
