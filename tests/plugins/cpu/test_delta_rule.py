"""The gated delta rule's kernels for bfloat16 on CPUs: near what PyTorch makes of the same numbers,
and the same to the bit however a sequence is cut into rows, and whatever else is computed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("numba")
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.ops import Ops
from tests.helpers.processor import HAS_BACKEND, threads

if not HAS_BACKEND:
    pytest.skip("only for x86-64", allow_module_level=True)
OURS, PLAIN = pick_ops(torch.device("cpu"), torch.bfloat16), Ops()
LINES = 4
TOKENS = 70
CUTS = [(1,) * TOKENS, (64, 6), (63, 1, 6), (24, 24, 22), (1, 69)]


class Shape(NamedTuple):
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def widths(self) -> tuple[int, int, int]:
        keys = self.key_heads * self.key_dim
        return keys, keys, self.heads * self.value_dim


SHAPES = [Shape(2, 4, 64, 64, 4), Shape(1, 3, 24, 40, 3), Shape(2, 2, 20, 37, 2)]
"""The second and third have widths that no vector divides."""


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """A convolution and the delta rule behind it, with states of their own."""

    def __init__(self, ops: Ops, shape: Shape) -> None:
        self._ops, self._shape = ops, shape
        channels = sum(shape.widths)
        self._taps = noise(shape.taps, channels, seed=1).bfloat16()
        self._bias, self._rate = noise(shape.heads, seed=2), -noise(shape.heads, seed=3).exp()
        self.conv = torch.full((LINES, shape.taps - 1, channels), torch.nan).bfloat16()
        self.states = torch.full((LINES, shape.heads, *shape[2:4]), torch.nan)

    def __call__(
        self,
        x: torch.Tensor,
        parts: Sequence[tuple[int, int, int]],
        kept: dict[int, int] | None = None,
    ) -> torch.Tensor:
        """Compute rows of (line, tokens before, tokens) each; a line of -1 only pads."""
        starts = torch.tensor([0, *(count for _, _, count in parts)]).cumsum(0).int()
        ends = [0 if line < 0 else before + count for line, before, count in parts]
        lines = torch.tensor([max(0, line) for line, _, _ in parts])
        rows = self._ops.state_rows(starts, torch.tensor(ends, dtype=torch.int32), lines, 0)
        rows = rows.with_kept(kept) if kept else rows
        mixed, both = x[:, : self._taps.shape[1]], x[:, self._taps.shape[1] :].contiguous()
        decay, beta = self._ops.delta_gates(both, self._bias, self._rate)
        mixed = self._ops.causal_conv(mixed, self._taps, self.conv, rows)
        dims = (self._shape.key_dim, self._shape.key_dim, self._shape.value_dim)
        split = mixed.split(self._shape.widths, dim=1)
        q, k, v = (each.unflatten(1, (-1, dim)) for each, dim in zip(split, dims))
        return self._ops.gated_delta(q, k, v, decay, beta, self.states, rows)


def inputs(shape: Shape, tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return noise(tokens, sum(shape.widths) + 2 * shape.heads, seed=seed).bfloat16()


def of_one(shape: Shape) -> tuple[torch.Tensor, Layer]:
    layer = Layer(OURS, shape)
    return layer(inputs(shape), [(1, 0, TOKENS)]), layer


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_is_near_what_pytorch_makes(shape: Shape) -> None:
    plain = Layer(PLAIN, shape)
    wanted = plain(inputs(shape), [(1, 0, TOKENS)])
    found, ours = of_one(shape)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(ours.states[1], plain.states[1], atol=2e-3, rtol=2e-2)
    assert torch.equal(ours.conv[1], plain.conv[1]), "inputs as they are"
    assert ours.states[[0, 2, 3]].isnan().all() and ours.conv[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_however_it_is_cut_a_sequence_has_its_bits(shape: Shape, cut: tuple[int, ...]) -> None:
    """Beside another sequence and padding."""
    wanted, whole = of_one(shape)
    x, others, layer = inputs(shape), inputs(shape, 5 * len(cut), seed=9), Layer(OURS, shape)
    done, found = 0, list[torch.Tensor]()
    for turn, count in enumerate(cut):
        other = others[5 * turn : 5 * turn + 5]
        packed = torch.cat((other[:3], other[3:], x[done : done + count]))
        out = layer(packed, [(3, 3 * turn, 3), (-1, 0, 2), (1, done, count)])
        assert not out[3:5].any(), "padding is 0"
        found.append(out[5:])
        done += count
    assert torch.equal(torch.cat(found), wanted)
    assert torch.equal(layer.states[1], whole.states[1])
    assert torch.equal(layer.conv[1], whole.conv[1])


def test_rows_that_go_on_from_each_other_keep_the_states_between() -> None:
    """As drafts do: one token to a row, each with a line for the state after it."""
    shape = SHAPES[0]
    wanted, _ = of_one(shape)
    x, layer, early = inputs(shape), Layer(OURS, shape), Layer(OURS, shape)
    first = layer(x[:67], [(1, 0, 67)])
    rest = layer(x[67:], [(1, 67, 1), (1, 68, 1), (1, 69, 1)], kept={1: 2})
    assert torch.equal(torch.cat((first, rest)), wanted)
    early(x[:69], [(1, 0, 69)])
    assert torch.equal(layer.states[2], early.states[1])
    assert torch.equal(layer.conv[2], early.conv[1])
    assert layer.states[3].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_change_no_bit(shape: Shape) -> None:
    with threads(1):
        alone, _ = of_one(shape)
    with threads(3):
        assert torch.equal(of_one(shape)[0], alone)


@pytest.mark.parametrize("heads", [1, 5, 48])
def test_gates_are_near_pytorchs_and_the_same_alone(heads: int) -> None:
    both = 6 * noise(33, 2 * heads).bfloat16()
    both[0, -1], both[1, -1] = 80.0, -80.0
    bias, rate = noise(heads, seed=1), -noise(heads, seed=2).exp()
    found, wanted = (ops.delta_gates(both, bias, rate) for ops in (OURS, PLAIN))
    for ours, plain in zip(found, wanted):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=2.0**-8)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-7, rtol=2e-6)
    for row in range(len(both)):
        alone = OURS.delta_gates(both[row : row + 1], bias, rate)
        assert all(torch.equal(one[0], ours[row]) for one, ours in zip(alone, found))


@pytest.mark.parametrize("dim", [64, 37])
def test_what_is_read_is_normalised_and_gated(dim: int) -> None:
    x, both = noise(9, 3, dim).bfloat16(), 8 * noise(9, 2, 3, dim, seed=1).bfloat16()
    weight, gate = 1 + 0.1 * noise(dim, seed=2).bfloat16(), both[:, 1]
    found, wanted = (ops.gated_rms_norm(x, gate, weight, 1e-6) for ops in (OURS, PLAIN))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=2.0**-6)  # PyTorch rounds once more
    alone = [
        OURS.gated_rms_norm(x[at : at + 1], gate[at : at + 1], weight, 1e-6) for at in range(9)
    ]
    assert torch.equal(torch.cat(alone), found)
    found, wanted = (ops.gate_heads(x, gate) for ops in (OURS, PLAIN))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=2.0**-7)
    alone = [OURS.gate_heads(x[at : at + 1], gate[at : at + 1]) for at in range(9)]
    assert torch.equal(torch.cat(alone), found)
