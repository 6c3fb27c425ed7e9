"""The instructions for products of rows with bfloat16 matrices, by AMX's tiles or AVX512-BF16's
vectors, told to LLVM through llvmlite.

A row's sums are made in the same order in any batch, one input behind another. Owns that order.
Unaware of tensors. Imported only to compile, where llvmlite is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from saccade.kernels.x86.dense_call import (
    AHEAD_BYTES,
    BLOCK,
    FIELDS,
    NAME,
    PANEL,
    POINTERS,
    ROWS,
    TILE_INPUTS,
    TILE_ROWS,
)
from saccade.kernels.x86.llvm import (
    FLOATS,
    I1,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LINE,
    MORE_BRAINS,
    PTR,
    VOID,
    Claims,
    Loop,
    Value,
    every,
    known,
    least,
    load,
    number,
    place,
    spread,
    times,
)

STRIDE = PANEL * 4
"""Bytes of a panel's pair of inputs, and of a row of sums."""
STEP_BYTES = TILE_ROWS * STRIDE
"""Of the inputs of a panel that a tile takes."""
WIDES = STRIDE // LINE
"""Tiles of outputs in a panel."""
BLOCK_BYTES = BLOCK * STRIDE
"""Of a block's sums."""
UNROLLED = 4
"""Pairs of inputs that vectors multiply between two tests of the loop."""
SETTLED = 2
"""Rows of the block before that are written in each step: AMX multiplies meanwhile."""
OUTPUTS = ir.VectorType(I16, PANEL)
"""A row of a panel, in the bits of bfloat16."""


def assembly(triple: str, tiled: bool) -> str:
    """Return LLVM's own text for the function. A piece of work is a panel, for some rows.

    tiled: by AMX's tiles.
    """
    module = ir.Module()
    module.triple = triple
    (_tiles if tiled else _vectors)(module)
    return str(module)


class _Piece:
    """A piece of work: where it lies, and how much there is.

    b: the builder. rows, panel, bias, target: pointers. count: of rows. stride, step: bytes between
    rows, and between the target's rows. inputs. outputs: from the panel's first on.
    """

    def __init__(self, task: Claims, leave: Callable[[], object] = lambda: None) -> None:
        """Take a piece. leave: as in `Claims.take_piece`."""
        b, said = task.b, task.said
        piece = task.take_piece(b.mul(said["panels"], said["portions"]), leave)
        first = times(b, b.urem(piece, said["panels"]), PANEL)
        row = b.mul(b.udiv(piece, said["panels"]), said["portion"])
        self.b, self.inputs = b, said["inputs"]
        self.count = least(b, b.sub(said["count"], row), said["portion"])
        self.stride, self.step = times(b, said["inputs"], 2), times(b, said["outputs"], 2)
        self.rows = place(b, said["rows"], b.mul(row, self.stride))
        self.panel = place(b, said["words"], times(b, first, self.stride))
        self.bias = place(b, said["bias"], times(b, first, 4))
        columns = b.add(b.mul(row, self.step), times(b, first, 2))
        self.target = place(b, said["result"], columns)
        self.outputs = b.sub(said["outputs"], first)


def _vectors(module: Value) -> None:
    """Make the function with vectors: `ROWS` rows at a time."""
    multiply = [_multiply_vectors(module, rows) for rows in range(1, ROWS + 1)]
    task = Claims(module, NAME, FIELDS, POINTERS)
    piece = _Piece(task)
    b, count = piece.b, piece.count
    loop = Loop(b, b.udiv(b.add(count, number(ROWS - 1)), number(ROWS)))
    first = times(b, loop.index, ROWS)
    rows = least(b, b.sub(count, first), number(ROWS))
    at = place(b, piece.rows, b.mul(first, piece.stride))
    target = place(b, piece.target, b.mul(first, piece.step))
    *blocks, behind = task.choose(rows, [number(rows) for rows in range(1, ROWS + 1)])
    for function, block in zip(multiply, blocks):
        b.position_at_end(block)
        told = at, piece.panel, piece.inputs, piece.bias, target, piece.step, piece.outputs
        b.call(function, told)
        b.branch(behind)
    b.position_at_end(behind)
    loop.close()
    task.done()


def _multiply_vectors(module: Value, rows: int) -> Value:
    """Write the product of this many rows with a panel.

    Arguments: (rows, panel, inputs, bias, target, bytes between the target's rows, outputs from
    here on)
    """
    kinds = [PTR, PTR, I64, PTR, PTR, I64, I64]
    function = ir.Function(module, ir.FunctionType(VOID, kinds), f"multiply_{rows}")
    function.linkage = "internal"
    left, panel, inputs, bias, target, step, outputs = function.args
    b = ir.IRBuilder(function.append_basic_block())
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    dot = known(module, name, FLOATS, FLOATS, MORE_BRAINS, MORE_BRAINS)
    fetch = known(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    how = [ir.Constant(I32, value) for value in (0, 2, 1)]  # read, to the second cache, data
    settle = _Settle(module, b, bias, outputs)
    starts = [place(b, left, times(b, inputs, 2 * row)) for row in range(rows)]
    nothing = [every(FLOATS, 0.0)] * (rows * WIDES)
    loop = Loop(b, b.udiv(inputs, number(2 * UNROLLED)), [*nothing, panel])
    *sums, begin = loop.values
    for pair in range(UNROLLED):
        b.call(fetch, [place(b, begin, pair * STRIDE + AHEAD_BYTES), *how])  # its neighbour comes
        wide = [load(b, INTS, begin, pair * STRIDE + each * LINE, LINE) for each in range(WIDES)]
        for row, start in enumerate(starts):
            where = b.add(times(b, loop.index, 4 * UNROLLED), number(4 * pair))
            both = b.bitcast(spread(b, load(b, I32, start, where, 4)), MORE_BRAINS)
            for each, loaded in enumerate(wide):
                cell = row * WIDES + each
                sums[cell] = b.call(dot, [sums[cell], both, b.bitcast(loaded, MORE_BRAINS)])
    loop.close([*sums, place(b, begin, UNROLLED * STRIDE)])
    for row in range(rows):
        where = place(b, target, times(b, step, row))
        settle.write(sums[row * WIDES : (row + 1) * WIDES], where)
    b.ret_void()
    return function


def _tiles(module: Value) -> None:
    """Make the function with tiles: a `BLOCK` of rows at a time."""
    multiply = {
        "first": _multiply_tiles(module, "first", tall=2, fetches=True),
        "next": _multiply_tiles(module, "next", tall=2, settles=True),
        "short": _multiply_tiles(module, "short", tall=1, fetches=True),
    }
    task = Claims(module, NAME, FIELDS, POINTERS, [BLOCK_BYTES] * 2)
    b, said = task.b, task.said
    set_tiles = known(module, "llvm.x86.ldtilecfg", VOID, PTR)
    b.call(set_tiles, [said["first_setting"]])
    release = known(module, "llvm.x86.tilerelease", VOID)
    piece = _Piece(task, lambda: b.call(release, []))
    stride, step = piece.stride, piece.step
    blocks, over = b.udiv(piece.count, number(BLOCK)), b.urem(piece.count, number(BLOCK))

    def told(block: Value, odd: Value) -> tuple[list[Value], list[Value]]:
        """Return what a block's product is told, and what of the block before."""
        made = [b.select(odd, *places) for places in (task.scratch[::-1], task.scratch)]
        before = place(b, piece.target, times(b, b.sub(block, number(1)), BLOCK, step))
        at = place(b, piece.rows, times(b, block, BLOCK, stride))
        told = [at, piece.panel, made[0], piece.inputs]
        return told, [made[1], piece.bias, before, step, piece.outputs]

    def settle(block: Value, rows: Value) -> None:
        """Write a block's sums, which nothing is multiplied after."""
        sums = told(block, _is_odd(b, block))[0][2]
        at = place(b, piece.target, times(b, block, BLOCK, step))
        _Settle(module, b, piece.bias, piece.outputs).write_rows(sums, at, rows, step)

    with b.if_then(b.icmp_signed(">", blocks, number(0))):
        b.call(multiply["first"], told(number(0), ir.Constant(I1, 0))[0])
        with b.if_then(b.icmp_signed(">", blocks, number(1))):
            loop = Loop(b, b.sub(blocks, number(1)))
            block = b.add(loop.index, number(1))
            product, before = told(block, _is_odd(b, block))
            b.call(multiply["next"], [*product, *before])
            loop.close()
        settle(b.sub(blocks, number(1)), number(BLOCK))
    with b.if_then(b.icmp_signed(">", over, number(0))):
        whole = b.icmp_signed(">=", said["count"], number(BLOCK))
        with b.if_then(whole):
            b.call(set_tiles, [said["last_setting"]])
        product, _ = told(blocks, _is_odd(b, blocks))
        with b.if_else(b.icmp_signed(">", over, number(TILE_ROWS))) as (both, one):
            with both:
                b.call(multiply["first"], product)
            with one:
                b.call(multiply["short"], product)
        with b.if_then(whole):
            b.call(set_tiles, [said["first_setting"]])
        settle(blocks, over)
    task.done()


def _is_odd(b: Value, value: Value) -> Value:
    return b.trunc(value, I1)


def _multiply_tiles(
    module: Value, name: str, *, tall: int, fetches: bool = False, settles: bool = False
) -> Value:
    """Make sums[rows, PANEL] = rows [rows, inputs] times a panel.

    tall: tiles that hold the rows. fetches: the panel's lines are asked for ahead. settles: the
    block before is written meanwhile.

    Arguments: (rows, panel, sums, inputs), and of the block before (sums, bias, target, bytes
    between the target's rows, outputs from here on)
    """
    kinds = [PTR, PTR, PTR, I64] + ([PTR, PTR, PTR, I64, I64] if settles else [])
    function = ir.Function(module, ir.FunctionType(VOID, kinds), f"multiply_{name}")
    function.linkage = "internal"
    rows, panel, sums, inputs, *before = function.args
    b = ir.IRBuilder(function.append_basic_block())
    tile = [ir.Constant(I8, index) for index in range(8)]
    get = known(module, "llvm.x86.tileloadd64", VOID, I8, PTR, I64)
    put = known(module, "llvm.x86.tilestored64", VOID, I8, PTR, I64)
    zero = known(module, "llvm.x86.tilezero", VOID, I8)
    dot = known(module, "llvm.x86.tdpbf16ps", VOID, I8, I8, I8)
    fetch = known(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    how = [ir.Constant(I32, value) for value in (0, 3, 1)]  # read, to the nearest cache, data
    stride, steps = times(b, inputs, 2), b.udiv(inputs, number(TILE_INPUTS))
    cells = [(half, wide) for half in range(tall) for wide in range(WIDES)]
    for half, wide in cells:
        b.call(zero, [tile[half * WIDES + wide]])
    if settles:
        made, bias, target, step, outputs = before
        settle = _Settle(module, b, bias, outputs)
    loop = Loop(b, steps)
    begin = place(b, panel, times(b, loop.index, STEP_BYTES))
    for line in range(0, STEP_BYTES if fetches else 0, LINE):
        b.call(fetch, [place(b, begin, AHEAD_BYTES + line), *how])
    for half in range(tall):
        where = b.add(times(b, stride, half * TILE_ROWS), times(b, loop.index, LINE))
        b.call(get, [tile[4 + half], place(b, rows, where), stride])
    for wide in range(WIDES):
        b.call(get, [tile[6 + wide], place(b, begin, wide * LINE), number(STRIDE)])
    for half, wide in cells:
        b.call(dot, [tile[half * WIDES + wide], tile[4 + half], tile[6 + wide]])
    if settles:
        first = times(b, loop.index, SETTLED)
        with b.if_then(b.icmp_signed("<", first, number(BLOCK))):
            for more in range(SETTLED):
                row = b.add(first, number(more))
                at = place(b, target, b.mul(row, step))
                settle.write_sums(place(b, made, times(b, row, STRIDE)), at)
    loop.close()
    for half, wide in cells:
        where = half * TILE_ROWS * STRIDE + wide * LINE
        b.call(put, [tile[half * WIDES + wide], place(b, sums, where), number(STRIDE)])
    if settles:
        first = times(b, steps, SETTLED)
        with b.if_then(b.icmp_signed("<", first, number(BLOCK))):
            rest = place(b, made, times(b, first, STRIDE)), place(b, target, b.mul(first, step))
            settle.write_rows(*rest, b.sub(number(BLOCK), first), step)
    b.ret_void()
    return function


class _Settle:
    """Writes rows of a panel's sums, with the bias, in bfloat16."""

    def __init__(self, module: Value, b: Value, bias: Value, left: Value) -> None:
        """Prepare what all rows share. left: outputs from here on."""
        self._b = b
        self._bias = [load(b, FLOATS, bias, wide * LINE) for wide in range(WIDES)]
        kinds = OUTPUTS, PTR, I32, ir.VectorType(I1, PANEL)
        self._put = known(module, f"llvm.masked.store.v{PANEL}i16.p0", VOID, *kinds)
        round_two = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        self._round = known(module, round_two, MORE_BRAINS, FLOATS, FLOATS)
        within = b.trunc(least(b, left, number(PANEL)), I16)
        nothing = ir.Constant(OUTPUTS, ir.Undefined)
        first = b.insert_element(nothing, within, ir.Constant(I32, 0))
        every_lane = b.shuffle_vector(first, nothing, every(ir.VectorType(I32, PANEL), 0))
        self._there = b.icmp_signed("<", ir.Constant(OUTPUTS, list(range(PANEL))), every_lane)

    def write(self, sums: Sequence[Value], target: Value) -> None:
        """Write one row. sums: its vectors."""
        b = self._b
        low, high = (b.fadd(total, bias) for total, bias in zip(sums, self._bias))
        rounded = b.bitcast(b.call(self._round, [high, low]), OUTPUTS)
        b.call(self._put, [rounded, target, ir.Constant(I32, 1), self._there])

    def write_sums(self, sums: Value, target: Value) -> None:
        """Write one row. sums: where they lie."""
        self.write(
            [load(self._b, FLOATS, sums, wide * LINE, LINE) for wide in range(WIDES)], target
        )

    def write_rows(self, sums: Value, target: Value, count: Value, stride: Value) -> None:
        """Write `count` rows, at least one. stride: bytes between the target's rows."""
        b = self._b
        loop = Loop(b, count)
        made = place(b, sums, times(b, loop.index, STRIDE))
        self.write_sums(made, place(b, target, b.mul(loop.index, stride)))
        loop.close()
