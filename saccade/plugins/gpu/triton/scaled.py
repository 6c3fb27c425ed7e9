"""Quantization of rows to 8 bits with dynamic scales (`fp8.quantise_rows`) as Triton kernels:
standalone, and fused with the operation before, so that 16-bit rows are not written to memory. Each
function is one launch.

A scale covers a whole row, or `group` inputs of it, and depends only on their values. Imported only
on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from saccade.kernels.matrix import FP8, Fp8Rows
from saccade.kernels.reference.fp8 import LARGEST, MIN_AMOUNT, padded_rows

LINES = 16
"""Maximum number of a row's groups per program, if a program need not process the whole row."""
WARP_VALUES = 512
"""Number of values per warp of a program."""
MAX_WARPS = 16


@dataclass(frozen=True, slots=True)
class RowTiling:
    """A program's values: `lines` groups, each with its own scale, of `width` values. Both are
    powers of two, and values beyond the end of the row are masked.
    """

    lines: int
    width: int

    @classmethod
    def of(cls, size: int, group: int, most: int | None = None) -> RowTiling:
        """Divide rows of `size` values, with `group` values per scale. most: the maximum lines."""
        lines = triton.next_power_of_2(size // group)
        return cls(min(lines, most or lines), triton.next_power_of_2(group))

    @property
    def warps(self) -> int:
        return max(1, min(MAX_WARPS, self.lines * self.width // WARP_VALUES))


@triton.jit
def _put(x, values, scales, row, line, c, known, scale_stride, size, width, largest, least):
    """Store x [L, W] float32, at positions `c` of a row, as 8 bits with one scale per line."""
    scale = tl.maximum(tl.max(tl.abs(x), 1), least) / largest
    tl.store(scales + line * scale_stride + row, scale, mask=line * width < size)
    # After the division, all values are within the format's range, unless they were not finite.
    tl.store(values + row * size + c, (x / scale[:, None]).to(values.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["scale_stride"])
def _quantise(
    x,
    values,
    scales,
    x_stride,
    scale_stride,
    largest,
    least,
    size: tl.constexpr,
    lines: tl.constexpr,
    width: tl.constexpr,
):
    """Program (row, block of groups)."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1) * lines + tl.arange(0, lines)
    c = line[:, None] * width + tl.arange(0, width)[None, :]
    known = c < size
    value = tl.load(x + row * x_stride + c, mask=known, other=0.0).to(tl.float32)
    _put(value, values, scales, row, line, c, known, scale_stride, size, width, largest, least)


@triton.jit(do_not_specialize=["scale_stride"])
def _add_norm_scaled(
    x,
    delta,
    weight,
    total,
    values,
    scales,
    eps,
    scale_stride,
    largest,
    least,
    size: tl.constexpr,
    lines: tl.constexpr,
    width: tl.constexpr,
):
    """Program (row): total = x + delta, then RMSNorm of total, in 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, lines)
    c = line[:, None] * width + tl.arange(0, width)[None, :]
    known = c < size
    kind = total.dtype.element_ty
    left = tl.load(x + row * size + c, mask=known, other=0.0).to(tl.float32)
    right = tl.load(delta + row * size + c, mask=known, other=0.0).to(tl.float32)
    added = (left + right).to(kind)  # rounded like the residual stream
    tl.store(total + row * size + c, added, mask=known)
    value = added.to(tl.float32)
    root = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / size + eps)
    value *= root * tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    value = value.to(kind).to(tl.float32)  # rounded as the reference does
    _put(value, values, scales, row, line, c, known, scale_stride, size, width, largest, least)


@triton.jit(do_not_specialize=["scale_stride"])
def _gate_scaled(
    gate_up,
    values,
    scales,
    scale_stride,
    largest,
    least,
    size: tl.constexpr,
    lines: tl.constexpr,
    width: tl.constexpr,
):
    """Program (row, block of groups): silu(gate) * up, in 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1) * lines + tl.arange(0, lines)
    c = line[:, None] * width + tl.arange(0, width)[None, :]
    known = c < size
    at = gate_up + row * (2 * size) + c
    kind = gate_up.dtype.element_ty
    left = tl.load(at, mask=known, other=0.0).to(tl.float32)
    right = tl.load(at + size, mask=known, other=0.0).to(tl.float32)
    gated = (left * tl.sigmoid(left)).to(kind).to(tl.float32)  # rounded as the reference does
    value = (gated * right).to(kind).to(tl.float32)
    _put(value, values, scales, row, line, c, known, scale_stride, size, width, largest, least)


def _room(count: int, size: int, group: int, like: torch.Tensor) -> Fp8Rows:
    """Allocate 8-bit rows. Rows of padding are uninitialized."""
    assert size % group == 0 and (group == size or group == triton.next_power_of_2(group))
    rows = padded_rows(count)
    values = torch.empty((rows, size), dtype=FP8, device=like.device)
    scales = torch.empty((size // group, rows), dtype=torch.float32, device=like.device).t()
    return Fp8Rows(values, scales, group, count, like.dtype)


def launch_quantise(x: torch.Tensor, group: int) -> Fp8Rows:
    """Compute `fp8.quantise_rows`."""
    assert x.stride(1) == 1
    count, size = x.shape
    found = _room(count, size, group, x)
    cut = RowTiling.of(size, group, LINES)
    if count:
        _quantise[count, triton.cdiv(size // group, cut.lines)](
            x,
            found.values,
            found.scales,
            x.stride(0),
            found.scales.stride(1),
            LARGEST,
            MIN_AMOUNT,
            size=size,
            lines=cut.lines,
            width=cut.width,
            num_warps=cut.warps,
        )
    return found


def launch_add_norm_scaled(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[torch.Tensor, Fp8Rows]:
    """Compute `layer.add_rms_norm`, with the second result in 8 bits."""
    assert x.is_contiguous() and delta.is_contiguous() and x.shape == delta.shape
    count, size = x.shape
    total, found = torch.empty_like(x), _room(count, size, group, x)
    cut = RowTiling.of(size, group)
    if count:
        _add_norm_scaled[(count,)](
            x,
            delta,
            weight,
            total,
            found.values,
            found.scales,
            eps,
            found.scales.stride(1),
            LARGEST,
            MIN_AMOUNT,
            size=size,
            lines=cut.lines,
            width=cut.width,
            num_warps=cut.warps,
        )
    return total, found


def launch_silu_gate_scaled(gate_up: torch.Tensor, group: int) -> Fp8Rows:
    """Compute `layer.gate` with SiLU, with the result in 8 bits."""
    assert gate_up.is_contiguous()
    count, size = gate_up.shape[0], gate_up.shape[1] // 2
    found = _room(count, size, group, gate_up)
    cut = RowTiling.of(size, group, LINES)
    if count:
        _gate_scaled[count, triton.cdiv(size // group, cut.lines)](
            gate_up,
            found.values,
            found.scales,
            found.scales.stride(1),
            LARGEST,
            MIN_AMOUNT,
            size=size,
            lines=cut.lines,
            width=cut.width,
            num_warps=cut.warps,
        )
    return found
