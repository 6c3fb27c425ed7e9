"""LLVM IR for bfloat16 GEMMs with AMX or AVX512-BF16.

Each row is reduced over inputs in order, so results are batch-invariant. Imported only to compile,
where llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from saccade.plugins.cpu.dense_call import (
    BLOCK,
    FIELDS,
    NAME,
    PANEL,
    POINTERS,
    PREFETCH_BYTES,
    ROWS,
    TILE_INPUTS,
    TILE_ROWS,
)
from saccade.plugins.cpu.llvm import (
    CACHE_LINE_BYTES,
    I1,
    I8,
    I16,
    I32,
    I64,
    PTR,
    V16F32,
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
    smin,
    splat,
)

STRIDE = PANEL * 4
"""Size in bytes of a pair of inputs in a panel, and of a row of accumulators."""
STEP_BYTES = TILE_ROWS * STRIDE
"""Size in bytes of the part of a panel that one AMX step multiplies."""
PANEL_VECTORS = STRIDE // CACHE_LINE_BYTES
"""Number of vectors of outputs in a panel, or of tiles with AMX."""
BLOCK_BYTES = BLOCK * STRIDE
"""Size in bytes of the accumulators of a block."""
UNROLLED = 4
"""Number of pairs of inputs per loop iteration with AVX512."""
EPILOGUE_ROWS = 2
"""Number of rows of the previous block that are stored in each step, while AMX multiplies."""
OUTPUTS = ir.VectorType(I16, PANEL)
"""Type of a row of a panel's outputs, as bfloat16 bits."""


def assembly(triple: str, tiled: bool) -> str:
    """Return LLVM IR for the GEMM. One work block is one panel and `portion` rows.

    tiled: whether to use AMX instead of AVX512.
    """
    module = ir.Module()
    module.triple = triple
    (_amx_gemm if tiled else _avx512_gemm)(module)
    return str(module)


class _WorkItem:
    def __init__(self, task: WorkQueue, on_exit: Callable[[], object] = lambda: None) -> None:
        """Emit code that claims a work block.

        on_exit: as in `WorkQueue.next_block`.
        """
        b, args = task.b, task.args
        item = task.next_block(b.mul(args["panels"], args["portions"]), on_exit)
        first = mul(b, b.urem(item, args["panels"]), PANEL)
        row = b.mul(b.udiv(item, args["panels"]), args["portion"])
        self.b, self.inputs = b, args["inputs"]
        self.count = smin(b, b.sub(args["count"], row), args["portion"])
        self.stride, self.step = mul(b, args["inputs"], 2), mul(b, args["outputs"], 2)
        self.rows = ptr_add(b, args["rows"], b.mul(row, self.stride))
        self.panel = ptr_add(b, args["words"], mul(b, first, self.stride))
        self.bias = ptr_add(b, args["bias"], mul(b, first, 4))
        columns = b.add(b.mul(row, self.step), mul(b, first, 2))
        self.target = ptr_add(b, args["result"], columns)
        self.outputs = b.sub(args["outputs"], first)


def _avx512_gemm(module: Value) -> None:
    multiply = [_multiply_vectors(module, rows) for rows in range(1, ROWS + 1)]
    task = WorkQueue(module, NAME, FIELDS, POINTERS)
    item = _WorkItem(task)
    b, count = item.b, item.count
    loop = Loop(b, b.udiv(b.add(count, i64(ROWS - 1)), i64(ROWS)))
    first = mul(b, loop.index, ROWS)
    rows = smin(b, b.sub(count, first), i64(ROWS))
    source = ptr_add(b, item.rows, b.mul(first, item.stride))
    target = ptr_add(b, item.target, b.mul(first, item.step))
    *blocks, after = task.switch(rows, [i64(rows) for rows in range(1, ROWS + 1)])
    for function, block in zip(multiply, blocks):
        b.position_at_end(block)
        arguments = source, item.panel, item.inputs, item.bias, target, item.step, item.outputs
        b.call(function, arguments)
        b.branch(after)
    b.position_at_end(after)
    loop.close()
    task.end_block()


def _multiply_vectors(module: Value, rows: int) -> Value:
    """Emit a function that multiplies this many rows with a panel.

    Its arguments: (rows, panel, inputs, bias, target, target's row stride, remaining outputs)
    """
    types = [PTR, PTR, I64, PTR, PTR, I64, I64]
    function = ir.Function(module, ir.FunctionType(VOID, types), f"multiply_{rows}")
    function.linkage = "internal"
    x, panel, inputs, bias, target, step, outputs = function.args
    b = ir.IRBuilder(function.append_basic_block())
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    dot = declare_intrinsic(module, name, V16F32, V16F32, V32BF16, V32BF16)
    prefetch = declare_intrinsic(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    options = [ir.Constant(I32, value) for value in (0, 2, 1)]  # read, into L2, data
    epilogue = _Epilogue(module, b, bias, outputs)
    starts = [ptr_add(b, x, mul(b, inputs, 2 * row)) for row in range(rows)]
    zeros = [splat(V16F32, 0.0)] * (rows * PANEL_VECTORS)
    loop = Loop(b, b.udiv(inputs, i64(2 * UNROLLED)), [*zeros, panel])
    *sums, begin = loop.values
    for pair in range(UNROLLED):
        b.call(prefetch, [ptr_add(b, begin, pair * STRIDE + PREFETCH_BYTES), *options])
        wide = [
            load(b, V16I32, begin, pair * STRIDE + index * CACHE_LINE_BYTES, CACHE_LINE_BYTES)
            for index in range(PANEL_VECTORS)
        ]
        for row, start in enumerate(starts):
            where = b.add(mul(b, loop.index, 4 * UNROLLED), i64(4 * pair))
            both = b.bitcast(broadcast(b, load(b, I32, start, where, 4)), V32BF16)
            for each, loaded in enumerate(wide):
                cell = row * PANEL_VECTORS + each
                sums[cell] = b.call(dot, [sums[cell], both, b.bitcast(loaded, V32BF16)])
    loop.close([*sums, ptr_add(b, begin, UNROLLED * STRIDE)])
    for row in range(rows):
        where = ptr_add(b, target, mul(b, step, row))
        epilogue.store_row(sums[row * PANEL_VECTORS : (row + 1) * PANEL_VECTORS], where)
    b.ret_void()
    return function


def _amx_gemm(module: Value) -> None:
    multiply = {
        "first": _multiply_tiles(module, "first", tall=2, prefetches=True),
        "next": _multiply_tiles(module, "next", tall=2, has_epilogue=True),
        "short": _multiply_tiles(module, "short", tall=1, prefetches=True),
    }
    task = WorkQueue(module, NAME, FIELDS, POINTERS, [BLOCK_BYTES] * 2)
    b, args = task.b, task.args
    set_tiles = declare_intrinsic(module, "llvm.x86.ldtilecfg", VOID, PTR)
    b.call(set_tiles, [args["first_setting"]])
    release = declare_intrinsic(module, "llvm.x86.tilerelease", VOID)
    item = _WorkItem(task, lambda: b.call(release, []))
    stride, step = item.stride, item.step
    blocks, over = b.udiv(item.count, i64(BLOCK)), b.urem(item.count, i64(BLOCK))

    def arguments_of(block: Value, odd: Value) -> tuple[list[Value], list[Value]]:
        """Return the arguments for multiplying a block, and for the epilogue of the
        previous block.
        """
        buffers = [b.select(odd, *places) for places in (task.scratch[::-1], task.scratch)]
        before = ptr_add(b, item.target, mul(b, b.sub(block, i64(1)), BLOCK, step))
        source = ptr_add(b, item.rows, mul(b, block, BLOCK, stride))
        arguments_of = [source, item.panel, buffers[0], item.inputs]
        return arguments_of, [buffers[1], item.bias, before, step, item.outputs]

    def store_block(block: Value, rows: Value) -> None:
        """Emit code that stores the last block. No further multiplication can overlap with it."""
        sums = arguments_of(block, _is_odd(b, block))[0][2]
        source = ptr_add(b, item.target, mul(b, block, BLOCK, step))
        _Epilogue(module, b, item.bias, item.outputs).store_rows(sums, source, rows, step)

    with b.if_then(b.icmp_signed(">", blocks, i64(0))):
        b.call(multiply["first"], arguments_of(i64(0), ir.Constant(I1, 0))[0])
        with b.if_then(b.icmp_signed(">", blocks, i64(1))):
            loop = Loop(b, b.sub(blocks, i64(1)))
            block = b.add(loop.index, i64(1))
            product, before = arguments_of(block, _is_odd(b, block))
            b.call(multiply["next"], [*product, *before])
            loop.close()
        store_block(b.sub(blocks, i64(1)), i64(BLOCK))
    with b.if_then(b.icmp_signed(">", over, i64(0))):
        has_full_block = b.icmp_signed(">=", args["count"], i64(BLOCK))
        with b.if_then(has_full_block):
            b.call(set_tiles, [args["last_setting"]])
        product, _ = arguments_of(blocks, _is_odd(b, blocks))
        with b.if_else(b.icmp_signed(">", over, i64(TILE_ROWS))) as (both, one):
            with both:
                b.call(multiply["first"], product)
            with one:
                b.call(multiply["short"], product)
        with b.if_then(has_full_block):
            b.call(set_tiles, [args["first_setting"]])
        store_block(blocks, over)
    task.end_block()


def _is_odd(b: Value, value: Value) -> Value:
    return b.trunc(value, I1)


def _multiply_tiles(
    module: Value, name: str, *, tall: int, prefetches: bool = False, has_epilogue: bool = False
) -> Value:
    """Emit a function that computes sums [rows, PANEL] = rows [rows, inputs] @ a panel.

    tall: the number of row tiles.
    prefetches: whether to prefetch the panel, too.
    has_epilogue: whether to store the results of the previous block, too.

    Its arguments: (rows, panel, sums, inputs). With an epilogue, the arguments for the previous
    block follow: (sums, bias, target, target's row stride, remaining outputs)
    """
    types = [PTR, PTR, PTR, I64] + ([PTR, PTR, PTR, I64, I64] if has_epilogue else [])
    function = ir.Function(module, ir.FunctionType(VOID, types), f"multiply_{name}")
    function.linkage = "internal"
    rows, panel, sums, inputs, *before = function.args
    b = ir.IRBuilder(function.append_basic_block())
    tile = [ir.Constant(I8, index) for index in range(8)]
    load_tile = declare_intrinsic(module, "llvm.x86.tileloadd64", VOID, I8, PTR, I64)
    store_tile = declare_intrinsic(module, "llvm.x86.tilestored64", VOID, I8, PTR, I64)
    zero = declare_intrinsic(module, "llvm.x86.tilezero", VOID, I8)
    dot = declare_intrinsic(module, "llvm.x86.tdpbf16ps", VOID, I8, I8, I8)
    prefetch = declare_intrinsic(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    options = [ir.Constant(I32, value) for value in (0, 3, 1)]  # read, into L1, data
    stride, steps = mul(b, inputs, 2), b.udiv(inputs, i64(TILE_INPUTS))
    cells = [(half, wide) for half in range(tall) for wide in range(PANEL_VECTORS)]
    for half, wide in cells:
        b.call(zero, [tile[half * PANEL_VECTORS + wide]])
    if has_epilogue:
        accumulators, bias, target, step, outputs = before
        epilogue = _Epilogue(module, b, bias, outputs)
    loop = Loop(b, steps)
    begin = ptr_add(b, panel, mul(b, loop.index, STEP_BYTES))
    for line in range(0, STEP_BYTES if prefetches else 0, CACHE_LINE_BYTES):
        b.call(prefetch, [ptr_add(b, begin, PREFETCH_BYTES + line), *options])
    for half in range(tall):
        offset = b.add(mul(b, stride, half * TILE_ROWS), mul(b, loop.index, CACHE_LINE_BYTES))
        b.call(load_tile, [tile[4 + half], ptr_add(b, rows, offset), stride])
    for wide in range(PANEL_VECTORS):
        b.call(load_tile, [tile[6 + wide], ptr_add(b, begin, wide * CACHE_LINE_BYTES), i64(STRIDE)])
    for half, wide in cells:
        b.call(dot, [tile[half * PANEL_VECTORS + wide], tile[4 + half], tile[6 + wide]])
    if has_epilogue:
        first = mul(b, loop.index, EPILOGUE_ROWS)
        with b.if_then(b.icmp_signed("<", first, i64(BLOCK))):
            for more in range(EPILOGUE_ROWS):
                row = b.add(first, i64(more))
                row_target = ptr_add(b, target, b.mul(row, step))
                epilogue.store_accumulators(
                    ptr_add(b, accumulators, mul(b, row, STRIDE)), row_target
                )
    loop.close()
    for half, wide in cells:
        offset = half * TILE_ROWS * STRIDE + wide * CACHE_LINE_BYTES
        b.call(
            store_tile, [tile[half * PANEL_VECTORS + wide], ptr_add(b, sums, offset), i64(STRIDE)]
        )
    if has_epilogue:
        first = mul(b, steps, EPILOGUE_ROWS)
        with b.if_then(b.icmp_signed("<", first, i64(BLOCK))):
            rest = (
                ptr_add(b, accumulators, mul(b, first, STRIDE)),
                ptr_add(b, target, b.mul(first, step)),
            )
            epilogue.store_rows(*rest, b.sub(i64(BLOCK), first), step)
    b.ret_void()
    return function


class _Epilogue:
    """Emits code that adds the bias to accumulators, and stores them as bfloat16."""

    def __init__(self, module: Value, b: Value, bias: Value, remaining: Value) -> None:
        """Emit code that loads the bias, and computes the mask of the remaining outputs."""
        self._b = b
        self._bias = [
            load(b, V16F32, bias, wide * CACHE_LINE_BYTES) for wide in range(PANEL_VECTORS)
        ]
        types = OUTPUTS, PTR, I32, ir.VectorType(I1, PANEL)
        self._store = declare_intrinsic(module, f"llvm.masked.store.v{PANEL}i16.p0", VOID, *types)
        round_two = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        self._round = declare_intrinsic(module, round_two, V32BF16, V16F32, V16F32)
        within = b.trunc(smin(b, remaining, i64(PANEL)), I16)
        undefined = ir.Constant(OUTPUTS, ir.Undefined)
        first = b.insert_element(undefined, within, ir.Constant(I32, 0))
        every_lane = b.shuffle_vector(first, undefined, splat(ir.VectorType(I32, PANEL), 0))
        self._mask = b.icmp_signed("<", ir.Constant(OUTPUTS, list(range(PANEL))), every_lane)

    def store_row(self, sums: Sequence[Value], target: Value) -> None:
        """Emit code that stores one row.

        sums: the vectors of its accumulators.
        """
        b = self._b
        low, high = (b.fadd(total, bias) for total, bias in zip(sums, self._bias))
        rounded = b.bitcast(b.call(self._round, [high, low]), OUTPUTS)
        b.call(self._store, [rounded, target, ir.Constant(I32, 1), self._mask])

    def store_accumulators(self, sums: Value, target: Value) -> None:
        """Emit code that stores one row.

        sums: a pointer to its accumulators.
        """
        self.store_row(
            [
                load(self._b, V16F32, sums, wide * CACHE_LINE_BYTES, CACHE_LINE_BYTES)
                for wide in range(PANEL_VECTORS)
            ],
            target,
        )

    def store_rows(self, sums: Value, target: Value, count: Value, stride: Value) -> None:
        """Emit code that stores `count` rows, at least one.

        stride: the target's row stride in bytes.
        """
        b = self._b
        loop = Loop(b, count)
        accumulators = ptr_add(b, sums, mul(b, loop.index, STRIDE))
        self.store_accumulators(accumulators, ptr_add(b, target, b.mul(loop.index, stride)))
        loop.close()
