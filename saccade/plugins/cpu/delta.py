"""Computes the gated delta rule of `reference/delta.py`, and its convolution, gates and norm, in
bfloat16 on CPUs.

Tokens are computed one after another, both in prefill and in decode. So results are batch-invariant
and do not depend on chunk boundaries. Imported only if used (`ops.X86Ops`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from saccade.kernels.reference.delta import LENGTH_EPS, StateRows
from saccade.plugins.cpu.kernel import Kernel, bits
from saccade.plugins.cpu.numba_call import CHANNELS, COLUMNS, NO_SLOT


@dataclass(frozen=True, slots=True)
class SequentialRows(StateRows):
    """Rows of a batch. Kernels read them from the batch's tensors, so `host` is empty."""

    # [R] int64: for each row, the slot of an additional copy of its final state, or `NO_SLOT`.
    # `None`: no state is copied.
    keeps: torch.Tensor | None = None

    @classmethod
    def of(
        cls, q_starts: torch.Tensor, kv_lengths: torch.Tensor, lines: torch.Tensor, singles: int
    ) -> SequentialRows:
        assert q_starts.dtype == kv_lengths.dtype == torch.int32 and lines.dtype == torch.int64
        return cls(q_starts, kv_lengths, lines, singles)

    def with_kept(self, kept: Mapping[int, int]) -> SequentialRows:
        """Return the same rows, with copies of the final states of some.

        kept: maps the index of a row's first token in the batch to the slot for the copy.
        """
        lines = [kept.get(start, NO_SLOT) for start in self.q_starts[:-1].tolist()]
        return replace(self, keeps=torch.tensor(lines))

    @property
    def arguments(self) -> tuple[int, ...]:
        """The addresses and sizes of the rows, as kernel arguments."""
        parts = self.q_starts, self.kv_lengths, self.lines
        keeps = 0 if self.keeps is None else self.keeps.data_ptr()
        return *(part.data_ptr() for part in parts), keeps, len(self.kv_lengths)


@cache
def _delta_gates() -> Kernel:
    return Kernel("delta_code", "delta_gates")


def compiled_delta_gates(
    both: torch.Tensor, bias: torch.Tensor, rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.delta.delta_gates`."""
    assert both.is_contiguous() and bias.is_contiguous() and rate.is_contiguous()
    tokens, heads = len(both), len(bias)
    decay, beta = torch.empty((2, tokens, heads))
    addresses = (each.data_ptr() for each in (both, bias, rate, decay, beta))
    _delta_gates()(tokens, both.numel(), *addresses, heads)
    return decay, beta


@cache
def _causal_conv(taps: int, silu: bool) -> Kernel:
    return Kernel("delta_code", "causal_conv", taps, CHANNELS, silu)


def compiled_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    *,
    silu: bool = True,
) -> torch.Tensor:  # [T, C]
    """Compute `reference.delta.causal_conv`."""
    assert isinstance(rows, SequentialRows)
    assert x.stride(1) == 1 and weight.is_contiguous() and states[0].is_contiguous()
    taps, channels = weight.shape
    items = -(-channels // CHANNELS)
    out = torch.empty((len(x), channels), dtype=x.dtype)
    sums = torch.empty((items, CHANNELS))
    addresses = (each.data_ptr() for each in (x, weight, out, states, sums))
    sizes = channels, x.stride(0), states.stride(0)
    _causal_conv(taps, silu)(items, taps * x.numel(), *addresses, *rows.arguments, *sizes)
    return out


@cache
def _gated_delta(key_dim: int, value_dim: int, group: int) -> Kernel:
    width = math.gcd(COLUMNS, value_dim)
    return Kernel("delta_code", "gated_delta", key_dim, value_dim, width, group)


def compiled_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:  # [T, Hv, Dv]
    """Compute `reference.delta.gated_delta`. q, k and v must be columns of one tensor."""
    assert isinstance(rows, SequentialRows)
    tokens, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[1:]
    assert tokens == 1 or q.stride(0) == k.stride(0) == v.stride(0)
    assert states[0].is_contiguous() and decay.is_contiguous() and beta.is_contiguous()
    width = math.gcd(COLUMNS, value_dim)
    items = heads * value_dim // width
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype)
    memory = torch.empty((items, 3 * key_dim + 4 * width))
    addresses = (each.data_ptr() for each in (q, k, v, out, decay, beta, states, memory))
    _gated_delta(key_dim, value_dim, heads // key_heads)(
        items,
        tokens * heads * key_dim * value_dim,
        *addresses,
        *rows.arguments,
        heads,
        v.stride(0),
        states.stride(0),
        bits(LENGTH_EPS),
    )
    return out


@cache
def _gated_rms_norm() -> Kernel:
    return Kernel("delta_code", "gated_rms_norm")


def compiled_gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute `Ops.gated_rms_norm` for x [T, H, D]."""
    assert x.is_contiguous() and gate.stride()[1:] == x.stride()[1:] and weight.is_contiguous()
    tokens, heads, dim = x.shape
    out = torch.empty_like(x)
    addresses = (each.data_ptr() for each in (x, gate, weight, out))
    _gated_rms_norm()(tokens, x.numel(), *addresses, heads, dim, gate.stride(0), bits(eps))
    return out
