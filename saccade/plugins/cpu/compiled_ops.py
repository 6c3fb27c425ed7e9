"""Compiled equivalents of small PyTorch operations, for use in captured steps (`capture.py`), where
the overhead of calling PyTorch exceeds the work of the operation.

Results are bit-identical to PyTorch's. PyTorch runs all other operations, such as the cosine, which
it computes with MKL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from saccade.plugins.cpu.kernel import Kernel

ATEN = torch.ops.aten
BF16 = torch.bfloat16

MachineCall = tuple[Any, list[int]]
"""A compiled function and its arguments."""
CompiledOp = Callable[..., Sequence[MachineCall]]
"""A function of the result and the arguments of a PyTorch operation. Returns the calls that compute
the result, or none if it does not support these arguments.
"""


def find_compiled_op(
    function: Any, given: Sequence[Any], named: Mapping[str, Any], results: Sequence[torch.Tensor]
) -> Sequence[MachineCall]:
    """Return the calls that replace a PyTorch operation, or none if PyTorch must run it.

    given: its positional arguments.
    named: its keyword arguments.
    """
    twin = COMPILED_OPS.get(function)
    if twin is None or named or len(results) != 1 or not results[0].is_contiguous():
        return ()
    return twin(results[0], *given)


def _call(kernel: Kernel, *numbers: int) -> MachineCall:
    return kernel.function, [0, 1, *numbers]


def _gather(
    source: torch.Tensor, index: torch.Tensor, out: torch.Tensor, across: bool
) -> Sequence[MachineCall]:
    if source.dim() != 2 or index.dim() != 1 or not index.is_contiguous():
        return ()
    if source.is_mkldnn or index.dtype != torch.int64 or source.itemsize % 2:
        return ()
    addresses = source.data_ptr(), index.data_ptr(), out.data_ptr()
    sizes = *out.shape, int(across), source.shape[int(across)], *source.stride()
    return [_call(_kernel("gather", source.itemsize // 2), *addresses, *sizes)]


def _embedding(
    out: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor, *_: Any
) -> Sequence[MachineCall]:
    return _gather(table, tokens, out, across=False)


def _index_select(
    out: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor
) -> Sequence[MachineCall]:
    return _gather(source, index, out, across=dim % max(1, source.dim()) == 1)


def _multiply(out: torch.Tensor, numbers: Any, factors: Any) -> Sequence[MachineCall]:
    for each in (numbers, factors):
        if not isinstance(each, torch.Tensor) or not each.is_contiguous():
            return ()
    kinds = numbers.dtype, factors.dtype
    if kinds != (torch.int64, torch.float32) or numbers.shape[1:] != factors.shape:
        return ()
    addresses = numbers.data_ptr(), factors.data_ptr(), out.data_ptr()
    return [_call(_kernel("mul_f32"), *addresses, *numbers.shape)]


def _negative(out: torch.Tensor, source: torch.Tensor) -> Sequence[MachineCall]:
    if source.dtype != torch.float32 or not source.is_contiguous():
        return ()
    return [_call(_kernel("negative"), source.data_ptr(), out.data_ptr(), out.numel())]


def _add(out: torch.Tensor, first: Any, second: Any) -> Sequence[MachineCall]:
    for each in (first, second):
        if not isinstance(each, torch.Tensor) or not each.is_contiguous():
            return ()
        if each.dtype != BF16 or each.shape != out.shape:
            return ()
    addresses = first.data_ptr(), second.data_ptr(), out.data_ptr()
    return [_call(_kernel("add_bf16"), *addresses, out.numel())]


def _convert(out: torch.Tensor, source: torch.Tensor, *_: Any) -> Sequence[MachineCall]:
    kinds = {(BF16, torch.float32): "widen", (torch.float32, BF16): "round_to_bf16"}
    name = kinds.get((source.dtype, out.dtype))
    if name is None or not source.is_contiguous():
        return ()
    return [_call(_kernel(name), source.data_ptr(), out.data_ptr(), out.numel())]


def _cat(out: torch.Tensor, parts: Sequence[torch.Tensor], dim: int = 0) -> Sequence[MachineCall]:
    if out.dim() != 2 or dim % 2 != 1 or out.itemsize % 2:
        return ()
    if not all(each.is_contiguous() and each.dtype == out.dtype for each in parts):
        return ()
    lanes, calls, before = out.itemsize // 2, [], 0
    for part in parts:
        rows, width = part.shape
        places = part.data_ptr(), out.data_ptr() + before * out.itemsize
        sizes = rows, width * lanes, out.shape[1] * lanes
        calls.append(_call(_kernel("concat_columns"), *places, *sizes))
        before += width
    return calls


COMPILED_OPS: Mapping[Any, CompiledOp] = {
    ATEN.embedding.default: _embedding,
    ATEN.index_select.default: _index_select,
    ATEN.mul.Tensor: _multiply,
    ATEN.neg.default: _negative,
    ATEN.cat.default: _cat,
    ATEN.to.dtype: _convert,
    ATEN.add.Tensor: _add,
}


@cache
def _kernel(name: str, *sizes: int) -> Kernel:
    return Kernel("compiled_ops_code", name, *sizes)
