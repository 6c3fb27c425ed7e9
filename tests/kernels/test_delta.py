"""The gated delta rule and its convolution, against token-by-token arithmetic and against
transformers' own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from saccade.kernels.reference.delta import StateRows, causal_conv, chunked_scan, gated_delta
from saccade.kernels.reference.delta import recurrent_reference as token_by_token

HK, HV, DK, DV, TAPS, LINES = 2, 4, 16, 8, 4, 5
CHANNELS = 2 * HK * DK + HV * DV
CUTS = [(70,), (1, 69), (65, 5), (64, 5, 1), (7, 50, 13)]
Inputs = tuple[torch.Tensor, ...]


def inputs(tokens: int, seed: int = 0) -> Inputs:
    """(q, k, v, decay, beta) of a sequence."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, HK, DK, generator=draw) for _ in range(2))
    v = torch.randn(tokens, HV, DV, generator=draw)
    decay = -torch.rand(tokens, HV, generator=draw) * 3
    return q, k, v, decay, torch.rand(tokens, HV, generator=draw)


def pack_heads(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Queries, keys and values as a convolution leaves them: views of one tensor."""
    sizes = [x[0].numel() for x in parts[:3]]
    mixed = torch.cat([x.flatten(1) for x in parts[:3]], dim=1)
    return [
        piece.unflatten(1, x.shape[1:])
        for piece, x in zip(mixed.split(sizes, dim=1), parts, strict=False)
    ]


def rows(parts: Sequence[tuple[int, int, int]], device: str = "cpu") -> StateRows:
    """Of (line, tokens before, tokens) each; a line of -1 only pads."""
    starts = torch.tensor([0, *(count for _, _, count in parts)]).cumsum(0).int()
    ends = [0 if line < 0 else before + count for line, before, count in parts]
    lines = torch.tensor([max(0, line) for line, _, _ in parts])
    singles = next((i for i, part in enumerate(parts) if part[2] != 1), len(parts))
    ends32 = torch.tensor(ends, dtype=torch.int32)
    return StateRows.of(starts.to(device), ends32.to(device), lines.to(device), singles)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_the_chunked_scan_is_what_tokens_do_one_by_one(tokens: int) -> None:
    q, k, v, decay, beta = inputs(tokens)
    q, k = (
        torch.nn.functional.normalize(x.double(), dim=-1).repeat_interleave(HV // HK, 1)
        for x in (q, k)
    )
    arguments = (q, k, v.double(), decay.double(), beta.double())
    states = torch.randn(2, HV, DK, DV, dtype=torch.float64)
    states[1] = states[0]
    torch.testing.assert_close(
        chunked_scan(*arguments, states[0]), token_by_token(*arguments, states[1])
    )
    torch.testing.assert_close(states[0], states[1])


@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_a_whole_sequence_is_transformers_own(tokens: int) -> None:
    q, k, v, decay, beta = inputs(tokens, seed=1)
    wide = (x.repeat_interleave(HV // HK, 1) for x in (q, k))  # transformers before 5.18 asks so
    wanted, last = torch_chunk_gated_delta_rule(
        *(x[None] for x in (*wide, v)),
        g=decay[None],
        beta=beta[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states = torch.full((LINES, HV, DK, DV), torch.nan)
    found = gated_delta(q, k, v, decay, beta, states, rows([(3, 0, tokens)]))
    torch.testing.assert_close(found, wanted[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(states[3], last[0], atol=2e-6, rtol=1e-5)
    assert states[[0, 1, 2, 4]].isnan().all(), "no other line is touched"


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        *(("torch", cut) for cut in CUTS),
        ("triton", CUTS[-1]),
        pytest.param("triton of 64", CUTS[-1], marks=pytest.mark.more),
        *(pytest.param("triton", cut, marks=pytest.mark.slow) for cut in CUTS[:-1]),
    ],
)
def test_chunks_of_packed_sequences_go_on_from_their_states(
    cut: tuple[int, ...], kind: str, device: str
) -> None:
    """Two sequences, the second one token at a time beside the first one's chunks, and padding."""
    first, second = inputs(70, seed=2), inputs(len(cut), seed=3)
    x = torch.randn(70, CHANNELS, generator=torch.Generator().manual_seed(4))
    y = torch.randn(len(cut), CHANNELS, generator=torch.Generator().manual_seed(5))
    convolve: Callable[..., torch.Tensor] = causal_conv
    scan: Callable[..., torch.Tensor] = gated_delta
    where = "cpu"
    if kind != "torch":
        from saccade.plugins.gpu.triton.delta import HALF, launch_conv, launch_delta

        convolve, scan, where = launch_conv, launch_delta, device
        if kind == "triton of 64" and device == "cpu":  # its products round, but not interpreted
            scan = partial(launch_delta, chunked=HALF)
    states = torch.full((LINES, HV, DK, DV), torch.nan, device=where)
    conv = torch.full((LINES, TAPS - 1, CHANNELS), torch.nan, device=where)
    weight = torch.randn(TAPS, CHANNELS, generator=torch.Generator().manual_seed(6))
    outs: list[torch.Tensor] = []
    convolved: list[torch.Tensor] = []
    done = 0
    for number, count in enumerate(cut):
        part, one = slice(done, done + count), slice(number, number + 1)
        packed = [
            torch.cat((b[one], torch.ones_like(b[:1]), a[part])).to(where)
            for a, b in zip(first, second)
        ]
        there = rows([(4, number, 1), (-1, 0, 1), (1, done, count)], where)
        outs.append(scan(*pack_heads(packed), *packed[3:], states, there).cpu())
        mixed = torch.cat((y[one], torch.ones_like(y[:1]), x[part])).to(where)
        convolved.append(convolve(mixed, weight.to(where), conv, there).cpu())
        done += count
    states, conv = states.cpu(), conv.cpu()
    alone = torch.zeros(LINES, HV, DK, DV)
    for line, at, whole in ((1, slice(2, None), first), (4, slice(0, 1), second)):
        wanted = gated_delta(*whole, alone, rows([(line, 0, len(whole[0]))]))  # type: ignore[call-arg, arg-type]
        found = torch.cat([out[at] for out in outs])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[line], alone[line], atol=1e-5, rtol=1e-5)
    assert states[[0, 2, 3]].isnan().all() and conv[[0, 2, 3]].isnan().all()
    for at, wide in ((slice(2, None), x), (slice(0, 1), y)):
        expected = causal_conv1d_fn(wide.t()[None], weight.t(), activation="silu")[0].t()
        found = torch.cat([out[at] for out in convolved])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_convolution_may_be_left_as_it_is(kind: str, device: str) -> None:
    """In chunks, behind what was before."""
    convolve, where = causal_conv, "cpu"
    if kind != "torch":
        from saccade.plugins.gpu.triton.delta import launch_conv as convolve

        where = device
    x = torch.randn(9, CHANNELS, generator=torch.Generator().manual_seed(4))
    weight = torch.randn(TAPS, CHANNELS, generator=torch.Generator().manual_seed(6))
    conv = torch.full((LINES, TAPS - 1, CHANNELS), torch.nan, device=where)
    found, done = [], 0
    for count in (1, 5, 1, 2):
        there = rows([(1, done, count)], where)
        part = x[done : done + count].to(where)
        found.append(convolve(part, weight.to(where), conv, there, silu=False).cpu())
        done += count
    expected = causal_conv1d_fn(x.t()[None], weight.t())[0].t()
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-6, rtol=1e-5)


def test_one_token_alone_needs_no_stride_in_common(device: str) -> None:
    """The step of a single row that decodes: views of one token have strides of any size."""
    from saccade.plugins.gpu.triton.delta import launch_delta

    q, k, v, decay, beta = inputs(1, seed=7)
    before = torch.randn(LINES, HV, DK, DV, generator=torch.Generator().manual_seed(8))
    alone, states = before.clone(), before.to(device)
    wanted = gated_delta(q, k, v, decay, beta, alone, rows([(2, 9, 1)]))
    q, k, v, decay, beta = (part.to(device) for part in (q, k, v, decay, beta))
    v = torch.cat((v, v), dim=1)[:, :HV]
    assert q.stride(0) != v.stride(0)
    found = launch_delta(q, k, v, decay, beta, states, rows([(2, 9, 1)], device))
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.cpu(), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_heads_of_real_checkpoints(device: str) -> None:
    """128 by 128: two sequences of several chunks, then one token more of each."""
    from saccade.plugins.gpu.triton.delta import launch_delta

    draw = torch.Generator().manual_seed(9)
    q, k = (torch.randn(102, 1, 128, generator=draw) for _ in range(2))
    v = torch.randn(102, 2, 128, generator=draw)
    decay, beta = -torch.rand(102, 2, generator=draw), torch.rand(102, 2, generator=draw)
    alone = torch.full((LINES, 2, 128, 128), torch.nan)
    states = alone.clone().to(device)
    steps = [([(3, 0, 67), (1, 0, 33)], slice(0, 100)), ([(3, 67, 1), (1, 33, 1)], slice(100, 102))]
    for parts, at in steps:
        a, b, c = pack_heads([each[at] for each in (q, k, v)])
        wanted = gated_delta(a, b, c, decay[at], beta[at], alone, rows(parts))
        a, b, c, d, e = (each.to(device) for each in (a, b, c, decay[at], beta[at]))
        found = launch_delta(a, b, c, d, e, states, rows(parts, device))
        torch.testing.assert_close(found.cpu(), wanted, atol=2e-5, rtol=1e-4)
    for line in (1, 3):
        torch.testing.assert_close(states[line].cpu(), alone[line], atol=2e-5, rtol=1e-4)
