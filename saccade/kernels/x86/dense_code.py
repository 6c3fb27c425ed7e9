"""The instructions for products of few rows with bfloat16 matrices by AMX, told to LLVM through
llvmlite.

A row's sums are made in the same order in any batch. Owns that order. Unaware of tensors. Only
`dense.py` imports this, where llvmlite is installed.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from saccade.kernels.x86.dense_call import (
    AHEAD_BYTES,
    FIELDS,
    MOST_ROWS,
    NAMES,
    PANEL,
    POINTERS,
    TILE_INPUTS,
    TILE_ROWS,
)
from saccade.kernels.x86.llvm import (
    FLOATS,
    I8,
    I32,
    I64,
    LINE,
    PTR,
    VOID,
    Claims,
    Loop,
    Value,
    known,
    load,
    narrowed,
    number,
    place,
    store,
    times,
)

STRIDE = PANEL * 4
"""Bytes of a panel's pair of inputs, and of a row of sums."""
STEP_BYTES = TILE_ROWS * STRIDE
"""Of the inputs of a panel that a tile takes."""
WIDES = STRIDE // LINE
"""Tiles of outputs in a panel."""
BFLOAT16 = 1
"""The place in FORMATS."""


def assembly(triple: str) -> str:
    """Return LLVM's own text for both functions. A piece of work is a panel, for all rows."""
    module = ir.Module()
    module.triple = triple
    settle = _settle(module)
    for tall, name in enumerate(NAMES, 1):
        multiply = _multiply(module, tall)
        task = Claims(module, name, FIELDS, POINTERS, [MOST_ROWS * STRIDE])
        b, said = task.b, task.said
        b.call(known(module, "llvm.x86.ldtilecfg", VOID, PTR), [said["tile_setting"]])
        leave = partial(b.call, known(module, "llvm.x86.tilerelease", VOID), [])
        panel = task.take_piece(said["panels"], leave)
        (sums,) = task.scratch
        first = times(b, panel, PANEL)
        words = place(b, said["words"], times(b, first, said["inputs"], 2))
        b.call(multiply, [said["rows"], words, sums, said["inputs"]])
        bias, target = place(b, said["bias"], times(b, first, 4)), times(b, first, 2)
        stride = times(b, said["panels"], 2 * PANEL)
        b.call(settle, [sums, bias, place(b, said["result"], target), said["count"], stride])
        task.done()
    return str(module)


def _multiply(module: Value, tall: int) -> Value:
    """Make sums[rows, PANEL] = rows [rows, inputs] times a panel. tall: tiles that hold the rows.

    Arguments: (rows, panel, sums, inputs)
    """
    kind = ir.FunctionType(VOID, [PTR, PTR, PTR, I64])
    function = ir.Function(module, kind, f"multiply_{tall}")
    function.linkage = "internal"
    rows, panel, sums, inputs = function.args
    b = ir.IRBuilder(function.append_basic_block())
    tile = [ir.Constant(I8, index) for index in range(8)]
    get = known(module, "llvm.x86.tileloadd64", VOID, I8, PTR, I64)
    put = known(module, "llvm.x86.tilestored64", VOID, I8, PTR, I64)
    zero = known(module, "llvm.x86.tilezero", VOID, I8)
    dot = known(module, "llvm.x86.tdpbf16ps", VOID, I8, I8, I8)
    fetch = known(module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
    how = [ir.Constant(I32, value) for value in (0, 3, 1)]  # read, to the nearest cache, data
    stride = times(b, inputs, 2)
    cells = [(half, wide) for half in range(tall) for wide in range(WIDES)]
    for half, wide in cells:
        b.call(zero, [tile[half * WIDES + wide]])
    loop = Loop(b, b.udiv(inputs, number(TILE_INPUTS)))
    begin = place(b, panel, times(b, loop.index, STEP_BYTES))
    for line in range(0, STEP_BYTES, LINE):
        b.call(fetch, [place(b, begin, AHEAD_BYTES + line), *how])
    for half in range(tall):
        where = b.add(times(b, stride, half * TILE_ROWS), times(b, loop.index, LINE))
        b.call(get, [tile[4 + half], place(b, rows, where), stride])
    for wide in range(WIDES):
        b.call(get, [tile[6 + wide], place(b, begin, wide * LINE), number(STRIDE)])
    for half, wide in cells:
        b.call(dot, [tile[half * WIDES + wide], tile[4 + half], tile[6 + wide]])
    loop.close()
    for half, wide in cells:
        where = half * TILE_ROWS * STRIDE + wide * LINE
        b.call(put, [tile[half * WIDES + wide], place(b, sums, where), number(STRIDE)])
    b.ret_void()
    return function


def _settle(module: Value) -> Value:
    """Write the sums of rows and a panel, with the bias, in bfloat16.

    Arguments: (sums, bias, target, how many rows, bytes between the target's rows)
    """
    function = ir.Function(module, ir.FunctionType(VOID, [PTR] * 3 + [I64] * 2), "settle")
    function.linkage = "internal"
    sums, bias, target, rows, stride = function.args
    b = ir.IRBuilder(function.append_basic_block())
    added = [load(b, FLOATS, bias, wide * LINE) for wide in range(WIDES)]
    loop = Loop(b, rows)
    made = place(b, sums, times(b, loop.index, STRIDE))
    where = place(b, target, b.mul(loop.index, stride))
    for wide in range(WIDES):
        total = b.fadd(load(b, FLOATS, made, wide * LINE), added[wide])
        store(b, narrowed(b, BFLOAT16, total), where, wide * LINE // 2)
    loop.close()
    b.ret_void()
    return function
