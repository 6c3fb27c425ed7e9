"""LLVM IR for GEMMs with 4- and 8-bit weights on x86 CPUs with AVX512-VNNI.

`vnni_layout.py` packs the tensors. Imported only to compile, where llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llvmlite import ir

from saccade.kernels.reference.int8 import LARGEST, MIN_SCALE
from saccade.plugins.cpu.llvm import (
    CACHE_LINE_BYTES,
    F32,
    I8,
    I32,
    I64,
    PTR,
    V16F16,
    V16F32,
    V16I8,
    V16I16,
    V16I32,
    VOID,
    Loop,
    MaskedStore,
    Value,
    WorkQueue,
    broadcast,
    declare_intrinsic,
    i64,
    load,
    mul,
    ptr_add,
    smin,
    splat,
    store,
)
from saccade.plugins.cpu.vnni_call import (
    FIELDS,
    FORMATS,
    LANES,
    PANEL_VECTORS,
    POINTERS,
    PREFETCH_BYTES,
    PRODUCT,
    QUANTISE,
    ROWS,
    TILE_INPUTS,
    TILE_PANELS,
    TILE_ROWS,
    TILED,
    ZERO,
)

UNROLLED = 4
"""Number of cache lines per vector of outputs in each loop iteration."""
PANEL = LANES * PANEL_VECTORS
"""Number of outputs in a work block."""


def assembly(triple: str, names: Iterable[str]) -> str:
    """Return LLVM IR for the functions with these names."""
    module = ir.Module()
    module.triple = triple
    for name in names:
        if name in QUANTISE:
            _quantise(module, name, *QUANTISE[name])
        elif name in PRODUCT:
            _gemm(module, PRODUCT[name])
        else:
            assert name == TILED
            _tiled_gemm(module)
    return str(module)


def _tile(b: Value, said: dict[str, Value], index: Value) -> tuple[Value, Value]:
    """Emit code that computes (first row, number of rows) of a tile. The first `extra` tiles have
    one more row than the others.
    """
    longer = b.icmp_signed("<", index, said["extra"])
    before = b.select(longer, index, said["extra"])
    count = b.add(said["base"], b.zext(longer, I64))
    return b.add(b.mul(index, said["base"]), before), count


def _inputs(b: Value, said: dict[str, Value], bits: int) -> tuple[Value, Value]:
    group = mul(b, said["steps"], UNROLLED * 4 * 8 // bits)
    return group, b.mul(group, said["groups"])


def _quantise(module: Value, name: str, bits: int, block: int) -> None:
    """Emit a function that quantizes rows to int8, with a scale for each group. One work block is
    one tile of rows.

    block: the block size of the Hadamard transform that is applied first. With LANES, no transform
    is applied.
    """
    task = WorkQueue(module, name, FIELDS, POINTERS)
    b, said = task.b, task.args
    wides = block // LANES
    row = {
        kind: _quantise_row(module, f"{name}_row_{kind}", bits, kind, wides)
        for kind in range(len(FORMATS))
    }
    tile = task.next_block(said["tiles"])
    first, count = _tile(b, said, tile)
    group, inputs = _inputs(b, said, bits)
    before = mul(b, first, said["groups"], 4)
    rows = ptr_add(b, said["rows"], b.mul(first, inputs))
    scales, sums = (ptr_add(b, said[name], before) for name in ("row_scales", "sums"))
    loop = Loop(b, count)
    values = mul(b, b.add(first, loop.index), inputs)
    lane = mul(b, loop.index, 4)
    *blocks, behind = task.switch(said["format"], [i64(kind) for kind in row])
    for (kind, function), block in zip(row.items(), blocks):
        b.position_at_end(block)
        source = ptr_add(b, said["source"], mul(b, values, 2 if kind else 4))
        targets = [ptr_add(b, pointer, lane) for pointer in (rows, scales, sums)]
        sizes = [mul(b, count, 4), said["groups"], group]
        b.call(function, [source, *targets, *sizes, said["unit"]])
        b.branch(behind)
    b.position_at_end(behind)
    loop.close()
    task.end_block()


def _quantise_row(module: Value, name: str, bits: int, kind: int, wides: int) -> Value:
    """Emit a function that quantizes one row.

    kind: the index of the row's dtype in FORMATS.
    wides: vectors per block of the Hadamard transform, or 1 for none.

    Its arguments: (source, quantized values, scales, sums, stride of the row's 32-bit words in
    bytes, groups, inputs per group, unit)
    """
    signature = ir.FunctionType(VOID, [PTR] * 4 + [I64] * 4)
    function = ir.Function(module, signature, name)
    function.linkage = "internal"
    source, numbers, scales, sums, stride, groups, group, unit = function.args
    b = ir.IRBuilder(function.append_basic_block())
    unit = b.bitcast(b.trunc(unit, I32), F32)
    item = 2 if kind else 4
    turns = b.udiv(group, i64(wides * LANES))
    outer = Loop(b, groups, [source, numbers])
    source, numbers = outer.values

    def read(turn: Value) -> list[Value]:
        start = mul(b, turn, wides * LANES * item)
        places = [ptr_add(b, source, b.add(start, i64(i * LANES * item))) for i in range(wides)]
        return _read_block(module, b, kind, places) if wides > 1 else [_load_f32(b, kind, *places)]

    larger = declare_intrinsic(module, f"llvm.umax.v{LANES}i32", V16I32, V16I32, V16I32)
    loop = Loop(b, turns, [splat(V16I32, 0)])
    (most,) = loop.values
    for wide in read(loop.index):
        # Positive floats are ordered as their bits are, and the bits of NaN are the largest.
        size = b.and_(b.bitcast(wide, V16I32), splat(V16I32, 0x7FFFFFFF))
        most = b.call(larger, [most, size])
    loop.close([most])
    reduce = declare_intrinsic(module, f"llvm.vector.reduce.umax.v{LANES}i32", I32, V16I32)
    scale = b.fdiv(b.bitcast(b.call(reduce, [most]), F32), ir.Constant(F32, LARGEST))
    small = b.fcmp_ordered("<", scale, ir.Constant(F32, MIN_SCALE))
    scale = b.select(small, ir.Constant(F32, MIN_SCALE), scale)
    divisor = broadcast(b, scale)
    loop = Loop(b, turns, [splat(V16I32, 0), numbers])
    total, spot = loop.values
    rint = declare_intrinsic(module, f"llvm.rint.v{LANES}f32", V16F32, V16F32)
    for wide in read(loop.index):
        whole = b.fptosi(b.call(rint, [b.fdiv(wide, divisor)]), V16I32)
        words = b.bitcast(b.trunc(whole, V16I8), ir.VectorType(I32, 4))
        for word in range(4):
            store(b, b.extract_element(words, ir.Constant(I32, word)), spot)
            spot = ptr_add(b, spot, stride)
        total = b.add(total, whole)
    loop.close([total, spot])
    add = declare_intrinsic(module, f"llvm.vector.reduce.add.v{LANES}i32", I32, V16I32)
    weight = ir.Constant(I32, -1 if bits == 4 else -ZERO)
    where = mul(b, outer.index, stride)
    store(b, b.fmul(scale, unit), scales, where)
    store(b, b.mul(b.call(add, [total]), weight), sums, where)
    outer.close([ptr_add(b, source, mul(b, group, item)), spot])
    b.ret_void()
    return function


def _read_block(module: Value, b: Value, kind: int, places: list[Value]) -> list[Value]:
    """Emit code that loads a block of vectors and applies the Hadamard transform. Results are
    bit-identical to `reference/hadamard.py`.

    Recursive, because the vectors of a large block do not fit in the registers.
    """
    if len(places) == 1:
        return [_hadamard(module, b, _load_f32(b, kind, places[0]))]
    half = len(places) // 2
    first = _read_block(module, b, kind, places[:half])
    pairs = [*zip(first, _read_block(module, b, kind, places[half:]))]
    return [*[b.fadd(*pair) for pair in pairs], *[b.fsub(*pair) for pair in pairs]]


def _hadamard(module: Value, b: Value, wide: Value) -> Value:
    add = declare_intrinsic(module, f"llvm.fma.v{LANES}f32", V16F32, V16F32, V16F32, V16F32)
    step = 1
    while step < LANES:
        swap = ir.Constant(V16I32, [lane ^ step for lane in range(LANES)])
        signs = ir.Constant(V16F32, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        wide = b.call(add, [wide, signs, b.shuffle_vector(wide, wide, swap)])
        step *= 2
    return wide


def _load_f32(b: Value, kind: int, pointer: Value) -> Value:
    if kind == 0:
        return load(b, V16F32, pointer)
    if kind == 1:
        raised = b.shl(b.zext(load(b, V16I16, pointer), V16I32), splat(V16I32, 16))
        return b.bitcast(raised, V16F32)
    return b.fpext(load(b, V16F16, pointer), V16F32)


def _gemm(module: Value, bits: int) -> None:
    tiles = [_multiply(module, bits, rows) for rows in range(1, ROWS + 1)]
    ends = {kind: _finish(module, kind, bits) for kind in range(len(FORMATS))}
    task = WorkQueue(
        module, f"product_{bits}", FIELDS, POINTERS, [ROWS * PANEL_VECTORS * CACHE_LINE_BYTES]
    )
    b, said = task.b, task.args
    outputs, groups = said["outputs"], said["groups"]
    count = b.lshr(b.add(outputs, i64(PANEL - 1)), i64(5))
    assert PANEL == 1 << 5
    panel = task.next_block(count)
    _, inputs = _inputs(b, said, bits)
    first = mul(b, panel, PANEL)
    values = mul(b, first, groups)
    words = ptr_add(b, said["words"], b.lshr(mul(b, first, inputs, bits), i64(3)))
    scales = ptr_add(b, said["scales"], mul(b, values, 2 if bits == 4 else 4))
    zeros = ptr_add(b, said["zeros"], mul(b, values, 2))
    loop = Loop(b, said["tiles"])
    row, rows = _tile(b, said, loop.index)
    before = mul(b, row, groups, 4)
    inside = [ptr_add(b, said["rows"], b.mul(row, inputs))]
    inside += [ptr_add(b, said[name], before) for name in ("row_scales", "sums")]
    *blocks, behind = task.switch(rows, [i64(rows) for rows in range(1, ROWS + 1)])
    for function, block in zip(tiles, blocks):
        b.position_at_end(block)
        b.call(function, [words, scales, zeros, *inside, task.scratch[0], groups, said["steps"]])
        b.branch(behind)
    b.position_at_end(behind)
    each = Loop(b, rows)
    made = ptr_add(b, task.scratch[0], mul(b, each.index, PANEL_VECTORS * CACHE_LINE_BYTES))
    at = b.add(mul(b, b.add(row, each.index), outputs), first)
    bias = ptr_add(b, said["bias"], mul(b, first, 4))
    *blocks, behind = task.switch(said["format"], [i64(kind) for kind in ends])
    for (kind, function), block in zip(ends.items(), blocks):
        b.position_at_end(block)
        target = ptr_add(b, said["result"], mul(b, at, 2 if kind else 4))
        b.call(function, [made, bias, target, b.sub(outputs, first)])
        b.branch(behind)
    b.position_at_end(behind)
    each.close()
    loop.close()
    task.end_block()


def _tiled_gemm(module: Value) -> None:
    """Emit the variant of `product_8` for large batches, with AMX.

    In this variant, `base` is the total number of rows, and `tiles` the number of blocks of
    TILE_ROWS rows. A work block is TILE_PANELS panels. Sums are exact integers, so results are
    bit-identical to `product_8`.
    """
    task = WorkQueue(
        module, TILED, FIELDS, POINTERS, [TILE_ROWS * PANEL_VECTORS * CACHE_LINE_BYTES]
    )
    b, said = task.b, task.args
    multiply = _multiply_tiled(module)
    settle = {kind: _tiled_epilogue(module, kind) for kind in range(len(FORMATS))}
    (sums,) = task.scratch
    b.call(declare_intrinsic(module, "llvm.x86.ldtilecfg", VOID, PTR), [said["tile_setting"]])
    outputs = said["outputs"]
    panels = b.lshr(b.add(outputs, i64(PANEL - 1)), i64(5))
    pieces = b.udiv(b.add(panels, i64(TILE_PANELS - 1)), i64(TILE_PANELS))
    leave = declare_intrinsic(module, "llvm.x86.tilerelease", VOID)
    piece = task.next_block(pieces, lambda: b.call(leave, []))
    _, inputs = _inputs(b, said, 8)
    start = mul(b, piece, TILE_PANELS)
    outer = Loop(b, said["tiles"])
    before = mul(b, outer.index, TILE_ROWS)
    rows = smin(b, b.sub(said["base"], before), i64(TILE_ROWS))
    left = ptr_add(b, said["rows"], b.mul(before, inputs))
    inner = Loop(b, smin(b, b.sub(panels, start), i64(TILE_PANELS)))
    first = mul(b, b.add(start, inner.index), PANEL)
    right = ptr_add(b, said["words"], b.mul(first, inputs))
    b.call(multiply, [left, right, sums, inputs])
    row_facts = [ptr_add(b, said[name], mul(b, before, 4)) for name in ("sums", "row_scales")]
    panel_facts = [ptr_add(b, said[name], mul(b, first, 4)) for name in ("scales", "bias")]
    at = b.add(mul(b, before, outputs), first)
    *blocks, behind = task.switch(said["format"], [i64(kind) for kind in settle])
    for (kind, function), block in zip(settle.items(), blocks):
        b.position_at_end(block)
        target = ptr_add(b, said["result"], mul(b, at, 2 if kind else 4))
        sizes = [rows, outputs, b.sub(outputs, first)]
        b.call(function, [sums, *row_facts, *panel_facts, target, *sizes])
        b.branch(behind)
    b.position_at_end(behind)
    inner.close()
    outer.close()
    task.end_block()


def _tiled_epilogue(module: Value, kind: int) -> Value:
    """Emit a function that scales the sums of a block of rows and a panel, and stores them as the
    dtype FORMATS[kind].

    Its arguments: (sums, correction of each row for the zero point, rows' scales, outputs' scales,
    bias, target, number of rows, outputs in the result, remaining outputs from this panel on)
    """
    signature = ir.FunctionType(VOID, [PTR] * 6 + [I64] * 3)
    function = ir.Function(module, signature, f"settle_tiled_{kind}")
    function.linkage = "internal"
    sums, less, turns, scales, bias, target, rows, outputs, left = function.args
    b = ir.IRBuilder(function.append_basic_block())
    factors, added = (
        [load(b, V16F32, pointer, wide * CACHE_LINE_BYTES) for wide in range(PANEL_VECTORS)]
        for pointer in (scales, bias)
    )
    keep = MaskedStore(module, b, kind, left, PANEL_VECTORS)
    add = declare_intrinsic(module, f"llvm.fma.v{LANES}f32", V16F32, V16F32, V16F32, V16F32)
    loop = Loop(b, rows)
    row = mul(b, loop.index, 4)
    minus, turn = (
        broadcast(b, load(b, I32, less, row, 4)),
        broadcast(b, load(b, F32, turns, row, 4)),
    )
    made = ptr_add(b, sums, mul(b, loop.index, PANEL_VECTORS * CACHE_LINE_BYTES))
    where = ptr_add(b, target, mul(b, loop.index, outputs, 2 if kind else 4))
    for wide in range(PANEL_VECTORS):
        total = b.sitofp(b.add(load(b, V16I32, made, wide * CACHE_LINE_BYTES), minus), V16F32)
        value = b.call(add, [b.fmul(total, factors[wide]), turn, splat(V16F32, 0.0)])
        keep.write(b.fadd(value, added[wide]), where, wide)
    loop.close()
    b.ret_void()
    return function


def _multiply_tiled(module: Value) -> Value:
    """Emit a function that computes sums [TILE_ROWS, PANEL] = rows [TILE_ROWS, inputs] @ a panel in
    int32, with AMX.

    Its arguments: (rows, panel, sums, inputs)
    """
    function = ir.Function(module, ir.FunctionType(VOID, [PTR, PTR, PTR, I64]), "multiply_tiled")
    function.linkage = "internal"
    rows, panel, sums, inputs = function.args
    b = ir.IRBuilder(function.append_basic_block())
    tile = [ir.Constant(I8, index) for index in range(8)]
    get = declare_intrinsic(module, "llvm.x86.tileloadd64", VOID, I8, PTR, I64)
    put = declare_intrinsic(module, "llvm.x86.tilestored64", VOID, I8, PTR, I64)
    zero = declare_intrinsic(module, "llvm.x86.tilezero", VOID, I8)
    dot = declare_intrinsic(
        module, "llvm.x86.tdpbsud", VOID, I8, I8, I8
    )  # signed rows times unsigned weights
    halves = range(2)
    for index in range(4):
        b.call(zero, [tile[index]])
    loop = Loop(b, b.lshr(inputs, i64(6)))
    assert TILE_INPUTS == 1 << 6
    for half in halves:
        where = b.add(mul(b, inputs, 16 * half), mul(b, loop.index, TILE_INPUTS))
        b.call(get, [tile[4 + half], ptr_add(b, rows, where), inputs])
    for wide in range(PANEL_VECTORS):
        where = b.add(
            mul(b, loop.index, 16 * PANEL_VECTORS * CACHE_LINE_BYTES), i64(wide * CACHE_LINE_BYTES)
        )
        b.call(
            get, [tile[6 + wide], ptr_add(b, panel, where), i64(PANEL_VECTORS * CACHE_LINE_BYTES)]
        )
        for half in halves:
            b.call(dot, [tile[2 * wide + half], tile[4 + half], tile[6 + wide]])
    loop.close()
    for wide in range(PANEL_VECTORS):
        for half in halves:
            where = ptr_add(
                b, sums, half * 16 * PANEL_VECTORS * CACHE_LINE_BYTES + wide * CACHE_LINE_BYTES
            )
            b.call(put, [tile[2 * wide + half], where, i64(PANEL_VECTORS * CACHE_LINE_BYTES)])
    b.ret_void()
    return function


def _multiply(module: Value, bits: int, rows: int) -> Value:
    """Emit a function that multiplies `rows` rows with a panel, and writes float32 [rows, PANEL].

    Its arguments: (words, scales, zeros, rows, row_scales, sums, result, groups, steps)
    """
    signature = ir.FunctionType(VOID, [PTR] * 7 + [I64] * 2)
    function = ir.Function(module, signature, f"multiply_{bits}_{rows}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    words, scales, zeros, numbers, row_scales, sums, made, groups, steps = function.args
    b = ir.IRBuilder(function.append_basic_block())
    cells = [(row, wide) for row in range(rows) for wide in range(PANEL_VECTORS)]
    for cell in range(len(cells)):
        store(b, splat(V16F32, 0.0), made, cell * CACHE_LINE_BYTES)
    outer = Loop(b, groups, [words, numbers])
    lanes = [b.add(mul(b, outer.index, PANEL), i64(LANES * wide)) for wide in range(PANEL_VECTORS)]
    starts = [mul(b, b.add(mul(b, outer.index, rows), i64(row)), 4) for row in range(rows)]
    less = [broadcast(b, load(b, I32, sums, start, 4)) for start in starts]
    begun = [splat(V16I32, 0) if bits == 4 else less[row] for row, _ in cells]
    # A single row alternates between two accumulators because each addition waits for the one
    # before.
    begun += [splat(V16I32, 0)] * (PANEL_VECTORS if rows == 1 else 0)
    inner = Loop(b, steps, [*begun, *outer.values])
    totals, after = _step(module, b, bits, rows, inner.values)
    inner.close([*totals, *after])
    if rows == 1:
        totals = [b.add(total, more) for total, more in zip(totals, totals[PANEL_VECTORS:])]
    # a * b + c with a single rounding
    add = declare_intrinsic(module, f"llvm.fma.v{LANES}f32", V16F32, V16F32, V16F32, V16F32)
    item, kind = (2, V16F16) if bits == 4 else (4, V16F32)
    factors = [load(b, kind, scales, mul(b, lane, item)) for lane in lanes]
    wholes = [b.sitofp(total, V16F32) for total in totals]
    if bits == 4:
        factors = [b.fpext(factor, V16F32) for factor in factors]
        points = [b.fpext(load(b, V16F16, zeros, mul(b, lane, 2)), V16F32) for lane in lanes]
        minus = [b.sitofp(each, V16F32) for each in less]
        wholes = [
            b.call(add, [minus[row], points[wide], whole])
            for whole, (row, wide) in zip(wholes, cells)
        ]
    turns = [broadcast(b, load(b, F32, row_scales, start, 4)) for start in starts]
    for cell, (row, wide) in enumerate(cells):
        scaled = b.fmul(wholes[cell], factors[wide])
        before = load(b, V16F32, made, cell * CACHE_LINE_BYTES)
        store(b, b.call(add, [scaled, turns[row], before]), made, cell * CACHE_LINE_BYTES)
    outer.close(after)
    b.ret_void()
    return function


def _step(
    module: Value, b: Value, bits: int, rows: int, carried: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Emit one iteration of the inner loop: UNROLLED cache lines for each vector of outputs.

    Returns the accumulators, and the pointers [words, rows] for the next iteration.
    """
    dot = declare_intrinsic(module, "llvm.x86.avx512.vpdpbusd.512", V16I32, V16I32, V16I32, V16I32)
    fetch = declare_intrinsic(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    how = [ir.Constant(I32, value) for value in (0, 2, 1)]  # read, into L2, data
    *totals, words, numbers = carried
    line, word = 0, 0
    for turn in range(UNROLLED):
        parts = []
        b.call(
            fetch, [ptr_add(b, words, line + PREFETCH_BYTES), *how]
        )  # the CPU prefetches the adjacent line as well
        for _ in range(PANEL_VECTORS):
            loaded = load(b, V16I32, words, line, CACHE_LINE_BYTES)
            line += CACHE_LINE_BYTES
            low = b.and_(loaded, splat(V16I32, 0x0F0F0F0F))
            high = b.and_(b.lshr(loaded, splat(V16I32, 4)), splat(V16I32, 0x0F0F0F0F))
            parts.append([low, high] if bits == 4 else [loaded])
        for half in range(8 // bits):
            other = rows == 1 and (turn * (8 // bits) + half) % 2
            for row in range(rows):
                four = broadcast(b, load(b, I32, numbers, word, 4))
                word += 4
                for wide in range(PANEL_VECTORS):
                    cell = row * PANEL_VECTORS + wide + (PANEL_VECTORS if other else 0)
                    totals[cell] = b.call(dot, [totals[cell], parts[wide][half], four])
    return totals, [ptr_add(b, words, line), ptr_add(b, numbers, word)]


def _finish(module: Value, kind: int, bits: int) -> Value:
    """Emit a function that adds the bias to one row of a panel, and stores it as the dtype
    FORMATS[kind].

    Its arguments: (float32 results, bias, target, remaining outputs from this panel on)
    """
    signature = ir.FunctionType(VOID, [PTR, PTR, PTR, I64])
    function = ir.Function(module, signature, f"finish_{bits}_{kind}")
    function.linkage = "internal"
    made, bias, target, left = function.args
    b = ir.IRBuilder(function.append_basic_block())
    keep = MaskedStore(module, b, kind, left, PANEL_VECTORS)
    for wide in range(PANEL_VECTORS):
        added = b.fadd(
            load(b, V16F32, made, wide * CACHE_LINE_BYTES),
            load(b, V16F32, bias, wide * CACHE_LINE_BYTES),
        )
        keep.write(added, target, wide)
    b.ret_void()
    return function
