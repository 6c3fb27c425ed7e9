"""The gated delta rule, which is linear attention with one state matrix per head, and the short
causal convolution before it.

This is the definition in plain PyTorch, for packed rows that update states in a state memory:
chunked scans for rows with many tokens, and a recurrent step for rows with one.

With a state S [Dk, Dv], each token computes S = exp(g) S; S += k (beta (v - S'k))'; out = S'q,
where queries and keys are normalized to length one (Yang et al., "Gated Delta Networks", 2024).
States and computation are in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional as F

CHUNK = 64
"""Tokens per chunk of the scan."""
LENGTH_EPS = 1e-6
LOOP_VALUES = 64
"""A multiple of the vector length of PyTorch's loops on any CPU."""


class HostRow(NamedTuple):
    """A row's bounds as the host reads them: tokens [start, end) of the batch update the state in
    slot `line`.

    fresh: True if the sequence starts with this row, and with a state of zeros.
    keep: the slot for a copy of the state after this row, or None.
    """

    line: int
    start: int
    end: int
    fresh: bool
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class StateRows:
    """R rows with T packed tokens, and where the state of each sequence is in state memory.

    Row r has tokens `[q_starts[r], q_starts[r + 1])`. They are the last of the first
    `kv_lengths[r]` tokens of its sequence. A row with `kv_lengths` 0 is padding, and does not
    change states.
    """

    q_starts: torch.Tensor  # [R + 1] int32
    kv_lengths: torch.Tensor  # [R] int32
    lines: torch.Tensor  # [R] int64
    singles: int  # number of rows with a single token, which are the first ones
    # the rows without padding, if the host reads them; rows with equal `line` continue each other
    host: tuple[HostRow, ...] = ()

    @classmethod
    def of(
        cls,
        q_starts: torch.Tensor,
        kv_lengths: torch.Tensor,
        lines: torch.Tensor,
        singles: int,
    ) -> StateRows:
        """Return the rows. `host` does not include padding."""
        starts = q_starts.tolist()
        host = tuple(
            HostRow(line, start, end, length == end - start)
            for line, start, end, length in zip(
                lines.tolist(), starts, starts[1:], kv_lengths.tolist()
            )
            if length and end > start
        )
        return cls(q_starts, kv_lengths, lines, singles, host)

    def with_kept(self, kept: Mapping[int, int]) -> StateRows:
        """Return the same rows, after which some states are copied.

        kept: for the index of a row's first token, the index in state memory of the copy.
        """
        assert self.host, "where rows are computed side by side, none goes on from another"
        host = tuple(row._replace(keep=kept.get(row.start)) for row in self.host)
        return replace(self, host=host)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's softplus of float32 values. The results do not depend on how many there are.

    PyTorch's loop rounds differently for the remainder after complete vectors, so a row's result
    would depend on the batch size. Padding to complete vectors avoids this.
    """
    flat = F.pad(x.flatten(), (0, -x.numel() % LOOP_VALUES))
    return F.softplus(flat)[: x.numel()].view(x.shape)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    *,
    silu: bool = True,
) -> torch.Tensor:  # [T, C]
    """Convolve each channel of x [T, C] with the last K inputs of its sequence, and apply SiLU.

    weight: [K, C]. The last one is for the newest input.
    states: the last inputs of the sequences, oldest first, [lines, K - 1, C]. They are updated.
    silu: False to skip the activation.
    """
    wide = weight.to(_wide(x))
    out = torch.zeros_like(x)
    before = len(wide) - 1
    for row in rows.host:
        state, length = states[row.line], row.end - row.start
        known = torch.zeros_like(state) if row.fresh else state
        inputs = torch.cat((known, x[row.start : row.end]))  # [K - 1 + L, C]
        total = inputs[:length] * wide[0]
        for tap in range(1, before + 1):
            total.addcmul_(inputs[tap : tap + length].to(wide.dtype), wide[tap])
        out[row.start : row.end] = F.silu(total) if silu else total
        state.copy_(inputs[length:])
        if row.keep is not None:
            states[row.keep].copy_(state)
    return out


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:  # [T, Hv, Dv]
    """Return the gated delta rule for packed rows, [T, Hv, Dv] in v's dtype.

    q, k: [T, Hk, Dk], not normalized.
    v: [T, Hv, Dv]. Hv / Hk adjacent value heads share a query and key head.
    decay: logarithms, at most 0, [T, Hv] float32.
    beta: [T, Hv] float32.
    states: [lines, Hv, Dk, Dv] float32. They are updated.
    """
    q, k = _unit(q, v.shape[1]), _unit(k, v.shape[1])
    q = q * q.shape[2] ** -0.5
    out = torch.zeros_like(v)
    wide, beta, decay = v.to(q.dtype), beta.to(q.dtype), decay.to(q.dtype)
    for row in rows.host:
        part = slice(row.start, row.end)
        state = states[row.line]
        if row.fresh:
            state.zero_()
        step = recurrent_step if row.end - row.start == 1 else chunked_scan
        out[part] = step(q[part], k[part], wide[part], decay[part], beta[part], state)
        if row.keep is not None:
            states[row.keep].copy_(state)
    return out


def recurrent_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return the output for one token, and update the state [H, Dk, Dv].

    q, k: [1, H, Dk].
    v: [1, H, Dv].
    decay, beta: [1, H].
    """
    state.mul_(decay[0].exp()[:, None, None])
    known = torch.bmm(k[0].unsqueeze(1), state)  # [H, 1, Dv]
    correction = (v[0].unsqueeze(1) - known) * beta[0][:, None, None]
    state.baddbmm_(k[0].unsqueeze(2), correction)
    return torch.bmm(q[0].unsqueeze(1), state).squeeze(1).unsqueeze(0)


def recurrent_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return the same as `chunked_scan`, computed token by token. For tests."""
    at = [slice(t, t + 1) for t in range(len(q))]
    parts = [recurrent_step(q[t], k[t], v[t], decay[t], beta[t], state) for t in at]
    return torch.cat(parts)


def chunked_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:  # [L, H, Dv]
    """Return the outputs for one sequence of L tokens, and update the state [H, Dk, Dv].

    Within a chunk, the corrections u of the tokens solve `(I + A) u = beta (v - decayed S'k)`,
    where A contains products of each key with earlier keys. A chunk therefore takes a few matmuls
    (the WY form of section 3.2 in the paper above).

    q, k: [L, H, Dk].
    v: [L, H, Dv].
    decay, beta: [L, H].
    """
    length, size = len(q), min(CHUNK, len(q))
    q, k, v, decay, beta = _chunks((q, k, v, decay, beta), size)  # [H, N, C, ...]
    since = decay.cumsum(-1)  # [H, N, C]: from the start of the chunk to each token
    between = since.unsqueeze(-1) - since.unsqueeze(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill_(later, -torch.inf).exp_()  # [H, N, C, C]
    weighed = k * beta.unsqueeze(-1)
    system = (weighed @ k.transpose(-1, -2)).mul_(between)
    grown = since.exp().unsqueeze(-1)
    sides = torch.cat((v * beta.unsqueeze(-1), weighed * grown), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, old = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = (q @ k.transpose(-1, -2)).mul_(between)
    q = q * grown
    k = (k * (since[..., -1:] - since).exp().unsqueeze(-1)).transpose(-1, -2)
    kept = since[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for i in range(q.shape[1]):
        correction = fresh[:, i] - old[:, i] @ state
        out[:, i] = torch.baddbmm(q[:, i] @ state, within[:, i], correction)
        state.mul_(kept[:, i]).baddbmm_(k[:, i], correction)
    return out.flatten(1, 2)[:, :length].transpose(0, 1)


def _chunks(tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Split [L, H, ...] into chunks [H, N, size, ...], padded with 0, which does not change
    states.
    """
    rest = -len(tensors[0]) % size
    found = []
    for x in tensors:
        padded = torch.cat((x, x.new_zeros(rest, *x.shape[1:]))) if rest else x
        found.append(padded.transpose(0, 1).contiguous().unflatten(1, (-1, size)))
    return found


def _unit(x: torch.Tensor, heads: int) -> torch.Tensor:
    x = x.to(_wide(x))
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)
    return x.repeat_interleave(heads // x.shape[1], dim=1) if heads != x.shape[1] else x


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
