"""Compiled attention of many rows on a CPU beside float64: within segments, and causal to pages. A
row's bits are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from saccade.kernels.matrix import FP8
from saccade.kernels.reference.paged import (
    PagedCache,
    PagedRows,
    PagedShape,
    paged_attention_reference,
    plain_cache,
)
from saccade.kernels.reference.segments import Segments
from saccade.plugins.cpu import attention
from saccade.plugins.cpu.attention import (
    KV_DTYPES,
    MAX_PAGED_QUERIES,
    Isa,
    attend,
    attend_pages,
    attend_segments,
    best_isa,
    causal_layout,
    full_layout,
    segment_layout,
)
from saccade.plugins.cpu.attention_call import KEY_BLOCK, QUERY_BLOCK
from tests.helpers.tensors import noise

if best_isa() is None:
    pytest.skip("the processor multiplies no bfloat16, or no llvmlite", allow_module_level=True)
pytest.importorskip("numba")
from saccade.plugins.cpu.attention_code import EXPONENTIAL
from saccade.plugins.cpu.language_attention import X86Attention

KINDS: list[Isa] = ["amx", "pairs"] if best_isa() == "amx" else ["pairs"]
DIMS = (2, 40, 64, 72, 80, 128)
MIXED = (64, 1, 64, 300, 0, QUERY_BLOCK, KEY_BLOCK + 1, 5)
"""Lengths of segments: whole blocks of queries and keys, a part of one, none."""
ALLOWED = 2**-7
"""Weights and answers are rounded to bfloat16 once each; answers of noise are below 2."""


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(kind: Isa, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of all calls, which are of this kind."""
    made: list[int] = []

    def note(usual: Callable[..., torch.Tensor], q: torch.Tensor, *rest: object) -> torch.Tensor:
        made.append(len(q))
        return usual(q, *rest)

    monkeypatch.setattr(attention, "best_isa", lambda: kind)
    for usual in (attend, attend_pages):
        monkeypatch.setattr(attention, usual.__name__, partial(note, usual))
    return made


def fused(rows: int, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    """q, k, v as a tower's product gives them: parts of one tensor."""
    return noise(rows, 3 * heads, dim, seed=rows).bfloat16().split(heads, dim=1)


def precise(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    parts = [[part.double() for part in each.split(list(lengths))] for each in (q, k, v)]
    return torch.cat(
        [
            torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", a, b) * 0.2).softmax(-1), c)
            for a, b, c in zip(*parts)
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_see_their_segment_and_nothing_else(dim: int, kind: Isa) -> None:
    q, k, v = fused(sum(MIXED), 2, dim)
    out = attend(q, k, v, segment_layout(MIXED), 0.2, kind)
    wanted = precise(q, k, v, MIXED)
    torch.testing.assert_close(out.double(), wanted, atol=ALLOWED, rtol=ALLOWED)


def paged(
    rows: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    kept: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, PagedCache, PagedRows]:
    """rows: (tokens, keys) of each; pages of 16 follow each other in no order. FP8 has scales."""
    pages = [-(-keys // 16) for _, keys in rows]
    source = torch.Generator().manual_seed(sum(pages))
    order = torch.randperm(sum(pages), generator=source).int() + 1
    table = torch.zeros(len(rows), max(pages), dtype=torch.int32)
    for line, some in enumerate(order.split(pages)):
        table[line, : len(some)] = some
    lying = ((sum(pages) + 1) * 16, kv_heads, dim)
    scales = (0.5, 0.25) if kept == FP8 else ()
    keys, values = (noise(*lying, seed=at).to(kept) for at in (1, 2))
    cache = plain_cache(keys, values, *scales)
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0).int()
    lengths = torch.tensor([keys for _, keys in rows], dtype=torch.int32)
    q = noise(int(starts[-1]), heads, dim, seed=3).bfloat16()
    return q, cache, PagedRows(starts, lengths, torch.arange(len(rows)), table, 16, 0)


PROMPTS = [
    (5, 5),
    (33, 700),
    (1, 40),
    (QUERY_BLOCK + 2, QUERY_BLOCK + 2),
    (300, 300),
    (2, KEY_BLOCK + 1),
]


def backend(kv_heads: int, dim: int, kept: torch.dtype = torch.bfloat16) -> X86Attention:
    return X86Attention(PagedShape(kv_heads, dim, 16, kept, torch.bfloat16))


@pytest.mark.first
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", KV_DTYPES, ids=["16", "8 bits"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 128), (2, 2, 80), (14, 2, 64)]
)
def test_prompts_see_what_was_before_them_on_any_pages(
    heads: int, kv_heads: int, dim: int, kept: torch.dtype, calls: list[int]
) -> None:
    q, cache, rows = paged(PROMPTS, heads, kv_heads, dim, kept)
    ours = backend(kv_heads, dim, kept)
    ours.plan(rows)
    found = ours(q, cache)
    assert calls == [5, 33, 1, QUERY_BLOCK + 302, 2], "neighbours share a call, few tokens another"
    wanted = paged_attention_reference(q.double(), cache, rows, dim**-0.5)
    torch.testing.assert_close(found.double(), wanted, atol=2 * ALLOWED, rtol=ALLOWED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", KV_DTYPES, ids=["16", "8 bits"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (14, 1, 128), (2, 2, 40)])
def test_a_token_has_the_same_bits_decoded_or_in_any_chunk(
    heads: int, kv_heads: int, dim: int, kept: torch.dtype, kind: Isa, calls: list[int]
) -> None:
    """What a prompt's token and a drawn one attend to is one sum, whatever is cached before it."""
    keys = KEY_BLOCK + 3 * MAX_PAGED_QUERIES
    q, cache, rows = paged([(keys, keys)], heads, kv_heads, dim, kept)
    ours = backend(kv_heads, dim, kept)
    ours.plan(rows)
    whole = ours(q, cache)
    assert calls == [keys]
    for count in (1, 2, 5, 9, 17, MAX_PAGED_QUERIES):
        ends = [count, 64, 65 + count, KEY_BLOCK - 1, KEY_BLOCK + count // 2, KEY_BLOCK + 40, keys]
        lines = torch.zeros(len(ends), dtype=torch.int64)
        starts = torch.arange(0, (len(ends) + 1) * count, count, dtype=torch.int32)
        lengths = torch.tensor(ends, dtype=torch.int32)
        ours.plan(PagedRows(starts, lengths, lines, rows.page_table, 16, 0))
        wanted = torch.cat([whole[end - count : end] for end in ends])
        found = ours(torch.cat([q[end - count : end] for end in ends]), cache)
        assert calls[-1] == len(found) and torch.equal(found, wanted), (count, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_eight_bits_is_read_as_it_is(kind: Isa) -> None:
    """Those below the least exponent, both zeros and what is no number, too."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).view(2, 1, 128)
    ones = torch.ones(2, 1, 128).to(FP8)
    for dim in (128, 40):  # whole vectors, and a part of one
        q = torch.ones(2, 1, dim, dtype=torch.bfloat16)
        k, v = (each[..., :dim] for each in (ones, numbers))
        found = attend(q, k, v, segment_layout((1, 1)), 0.1, kind)
        torch.testing.assert_close(found, v.bfloat16(), atol=0, rtol=0, equal_nan=True)
        scores = attend(v.bfloat16().nan_to_num(), v, ones[..., :dim], segment_layout((2,)), 0.1)
        assert scores.isnan().any() == v.bfloat16().isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_sees_no_keys_gets_zeros(kind: Isa, calls: list[int]) -> None:
    """Rows of padding are such, and so are what start-up measures."""
    q, cache, rows = paged([(1, 20), (1, 40)], 4, 2, 64)
    ours = backend(2, 64)
    ours.plan(replace(rows, kv_lengths=torch.tensor([0, 40], dtype=torch.int32)))
    found = ours(q, cache)
    assert calls == [2] and not found[0].any()
    ours.plan(rows)
    assert torch.equal(found[1], ours(q, cache)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_any_length_are_one_call(kind: Isa, calls: list[int]) -> None:
    lengths = (1, 4, 16, 64, 64)
    q, k, v = fused(sum(lengths), 3, 64)
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    together = attend_segments(q, k, v, Segments(bounds, max(lengths)), 0.1)
    assert calls == [sum(lengths)]
    assert torch.equal(together, attend(q, k, v, segment_layout(lengths), 0.1, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_packed_where_they_are_read(kind: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of work that alone reads its keys packs them: not all keys first."""
    packed: list[int] = []
    usual = attention._aligned

    def note(values: int) -> torch.Tensor:
        packed.append(values)
        return usual(values)

    monkeypatch.setattr(attention, "_aligned", note)
    windows, mixed = (64, 64, 1, QUERY_BLOCK, 32), (64, 64, 1, QUERY_BLOCK, 32, QUERY_BLOCK + 1)
    q, k, v = fused(sum(mixed), 3, 80)
    together = attend(q, k, v, segment_layout(mixed), 0.1, kind)
    assert all(packed)
    packed.clear()
    some = slice(0, sum(windows))
    out = attend(q[some], k[some], v[some], segment_layout(windows), 0.1, kind)
    assert packed == [0, 0] and torch.equal(out, together[some])
    shared = causal_layout([(0, 40, 60)], [np.arange(60)], 2)
    wide = attend(q[:40, :2], k[:60, :1], v[:60, :1], shared, 0.1, kind)
    assert packed == [0] * 4, "heads that share keys are one piece"
    for head in (0, 1):
        alone = causal_layout([(0, 40, 60)], [np.arange(60)])
        own = attend(q[:40, head : head + 1], k[:60, :1], v[:60, :1], alone, 0.1, kind)
        assert torch.equal(own[:, 0], wide[:, head])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_thread(kind: Isa) -> None:
    q, k, v = fused(sum(MIXED), 6, 72)
    together = attend(q, k, v, segment_layout(MIXED), 0.1, kind)
    for own, parts in zip(together.split(MIXED), zip(*(x.split(MIXED) for x in (q, k, v)))):
        a, b, c = parts
        alone = attend(a, b, c, segment_layout((len(own),)), 0.1, kind)
        assert torch.equal(alone, own), len(own)
    for head in (0, 5):
        a, b, c = (x[:, head : head + 1] for x in (q, k, v))
        alone = attend(a, b, c, segment_layout(MIXED), 0.1, kind)
        assert torch.equal(alone[:, 0], together[:, head])
    part = attend(q[:37], k, v, full_layout(37, len(k)), 0.1, kind)
    whole = attend(q, k, v, full_layout(len(q), len(k)), 0.1, kind)
    assert torch.equal(part, whole[:37])
    torch.set_num_threads(1)
    assert torch.equal(attend(q, k, v, segment_layout(MIXED), 0.1, kind), together)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_any_chunks_has_the_same_bits(kind: Isa) -> None:
    keys = 2 * KEY_BLOCK + 77
    q, k, v = noise(keys, 4, 64).bfloat16(), *noise(2, keys, 2, 64, seed=1).bfloat16()
    places = [np.arange(keys)]
    whole = attend(q, k, v, causal_layout([(0, keys, keys)], places), 0.125, kind)
    for cuts in ((1, 130, 131, 400, keys), (256, 512, keys), (keys - 1, keys)):
        for start, end in zip((0, *cuts), cuts):
            layout = causal_layout([(0, end - start, end)], [np.arange(end)])
            chunk = attend(q[start:end], k[:end], v[:end], layout, 0.125, kind)
            assert torch.equal(chunk, whole[start:end]), (start, end)
            layout = causal_layout([(0, end - start, end)], [np.arange(end)], group=2)
            assert torch.equal(attend(q[start:end], k[:end], v[:end], layout, 0.125, kind), chunk)
    turned = torch.randperm(keys, generator=torch.Generator().manual_seed(1))
    keys_there, values_there = torch.empty_like(k), torch.empty_like(v)
    keys_there[turned], values_there[turned] = k, v
    layout = causal_layout([(0, keys, keys)], [turned.numpy()])
    assert torch.equal(attend(q, keys_there, values_there, layout, 0.125, kind), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_segment_and_extremes_stay_finite(kind: Isa) -> None:
    q, k, v = (x.clone() for x in fused(200, 2, 64))
    q[150, 0, 3] = k[20, 1, 5] = torch.nan
    q[90:100] *= 1e4  # one key takes all of the weight
    v[199] = 3e38
    out = attend(q, k, v, segment_layout((64, 66, 70)), 0.125, kind)
    assert out[:64, 1].isnan().all() and out[150, 0].isnan().all()
    assert out[:64, 0].isfinite().all() and out[64:150].isfinite().all()
    assert out[151:, 1].isfinite().all()
    apart = torch.einsum("qhd,khd->hqk", q[90:100].double(), k[64:130].double()) * 0.125
    wanted = torch.einsum("hqk,khd->qhd", apart.softmax(-1), v[64:130].double())
    torch.testing.assert_close(out[90:100].double(), wanted, atol=2e-2, rtol=ALLOWED)


def test_towers_take_it_in_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    usual = attention.attend

    def note(q: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(tuple(q.shape))
        return usual(q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend", note)
    lengths = (300, 300, 257)
    own = Segments(torch.tensor([0, *lengths]).cumsum(0).int(), 300)
    for dim, dtype in ((64, torch.bfloat16), (64, torch.float32), (130, torch.bfloat16)):
        q, k, v = (x.to(dtype) for x in fused(sum(lengths), 2, dim))
        out = attend_segments(q, k, v, own, 0.2)
        torch.testing.assert_close(
            out.double(), precise(q, k, v, lengths), atol=2 * ALLOWED, rtol=ALLOWED
        )
    whole = Segments(torch.tensor([0, 100], dtype=torch.int32), 100)
    q, k, v = fused(sum(lengths), 2, 64)
    attend_segments(q[:100], k, v, whole, 0.2)
    assert calls == [(857, 2, 64), (100, 2, 64)]


def test_powers_of_two_are_right_to_a_part_in_three_hundred_thousand() -> None:
    x = np.linspace(0, 1, 100_001, dtype=np.float32)
    made = np.zeros_like(x)
    for power in reversed(EXPONENTIAL):
        made = made * x + np.float32(power)
    assert np.abs(made / np.exp2(x.astype(np.float64)) - 1).max() < 1 / 300_000
