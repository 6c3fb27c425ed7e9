"""Paged attention kernels beside their reference, without a GPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from saccade.core.family import AttentionShape, KVSpec, heads_cache
from saccade.kernels import device as placement
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.paged import (
    DecodeWork,
    PagedCache,
    PagedRows,
    paged_attention_reference,
    plain_cache,
)
from saccade.kernels.reference.rotary import Rotation, rotary_tables
from saccade.nn.protocol import Batch
from saccade.runtime.attention import attention_for

pytest.importorskip("triton")
from saccade.plugins.gpu.triton.attention import Tile, attend_block
from saccade.plugins.gpu.triton.ops import TritonOps
from saccade.plugins.gpu.triton.paged import (
    PREFILL,
    PREFILL_LARGE_SMALL,
    PREFILL_SMALL,
    PREFILL_THIN_SMALL,
    launch_paged,
    prefill_splits,
    prefill_tile,
)
from saccade.plugins.gpu.triton.paged_decode import MAX_KV_SPLITS, share_keys
from tests.kernels.conftest import bounds, broad

TOLERANCE = bounds(2e-6, 2e-3)
HALVES = [dtype for dtype in TOLERANCE if dtype.itemsize == 2]
HEAD_SIZES = [16, 64, 72, 80, 96, 128, 256, 512]
SMALL = Tile(rows=16, keys=16, warps=4, stages=1)
"""Blocks so small that few tokens cross several."""


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    device: str,
    lengths: Sequence[tuple[int, int]],
    *,
    singles: int,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    kept: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    piece: int | None = 64,
    tile: Tile | None = SMALL,
    tolerance: float | None = None,
    window: int | None = None,
    images: Sequence[tuple[int, int, int]] = (),
    both_ways: bool = True,
    latents: bool = False,
) -> None:
    """Rows of (tokens, keys) on pages in no order; the table's lines are in no order either.
    latents: the keys are the values as well.
    images: (row, first, end) of its tokens. Pages that no token of a row can see are not numbers.
    """
    count = len(lengths)
    pages = [-(-keys // page) for _, keys in lengths]
    widest, lines = max(pages) + 1, count + 2
    order = 1 + torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1))
    table = torch.full((lines, widest), 10**6, dtype=torch.int32)  # not to be read
    line = torch.randperm(lines, generator=torch.Generator().manual_seed(2))[:count]
    for row, mine in enumerate(order.split(pages)):
        table[line[row], : len(mine)] = mine.int()
    slots = (1 + sum(pages)) * page
    keys = noise(slots, heads[1], dim, seed=3, dtype=dtype).to(kept or dtype).to(device)
    values = noise(slots, heads[1], dim, seed=4, dtype=dtype).to(kept or dtype).to(device)
    shape = AttentionShape(heads[1], dim, latent=latents, window=window, both_ways=both_ways)
    cache = PagedCache(keys, keys if latents else values, *scales, shape=shape)
    for row, mine in enumerate(order.split(pages)):
        if window is not None:
            first = max(0, lengths[row][1] - max(1, lengths[row][0]) - window + 1)
            whole = first if row < singles else first // 64 * 64  # as pieces are cut
            for page_number in mine[: whole // page].tolist():
                for each in (cache.keys, cache.values):
                    each[page_number * page : (page_number + 1) * page] = torch.nan
    starts = torch.tensor([0, *(tokens for tokens, _ in lengths)]).cumsum(0).int()
    rows = PagedRows(
        starts.to(device),
        torch.tensor([keys for _, keys in lengths], dtype=torch.int32, device=device),
        line.to(device),
        table.to(device),
        page,
        singles,
        sees=seen(lengths, images).to(device) if images else None,
    )
    fused = noise(int(starts[-1]), heads[0] + 3, dim, seed=5, dtype=dtype).to(device)
    q = fused[:, : heads[0]]  # a view of a larger tensor
    ours = launch_paged(q, cache, rows, dim**-0.5, piece=piece, prefill=tile)
    if window:  # 8 bits cannot be looked through
        known = [each.float().nan_to_num().to(each.dtype) for each in (cache.keys, cache.values)]
        cache = replace(cache, keys=known[0], values=known[1])
    wanted = paged_attention_reference(q.double(), cache, rows, dim**-0.5)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), wanted, atol=tolerance or TOLERANCE[dtype], rtol=0.0)


def seen(
    lengths: Sequence[tuple[int, int]], images: Sequence[tuple[int, int, int]]
) -> torch.Tensor:
    """How many keys each token sees: those up to its own, or all of its image."""
    found = [torch.arange(keys - tokens, keys) + 1 for tokens, keys in lengths]
    for row, first, end in images:
        found[row][first:end] = found[row][end - 1].item()
    return torch.cat(found)


@pytest.mark.more
@pytest.mark.parametrize(
    ("dim", "dtype", "page"),
    broad(
        product(HEAD_SIZES, TOLERANCE, (1, 16)),
        keep=[
            *((16, torch.float32, 1), (72, torch.float16, 16)),
            *((128, torch.float32, 16), (256, torch.float16, 1), (512, torch.float16, 16)),
        ],
    ),
)
def test_decode_prefill_and_both_in_one_step(
    device: str, dim: int, dtype: torch.dtype, page: int
) -> None:
    check(
        device,
        [(1, 1), (1, 37), (1, 70), (5, 5), (19, 40), (1, 33)],
        singles=3,
        dim=dim,
        dtype=dtype,
        page=page,
    )


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [
        (4, 32, torch.float32),
        pytest.param(6, 40, HALVES[0], marks=pytest.mark.more),
        pytest.param(16, 576, torch.float32, marks=pytest.mark.more),
        pytest.param(48, 576, HALVES[0], marks=pytest.mark.more),
        pytest.param(3, 288, HALVES[-1], marks=pytest.mark.more),
    ],
)
def test_latents_are_keys_and_values_of_all_heads(
    device: str, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """As DeepSeek's: 512 + 64 values; one long row beside short ones, several pieces."""
    lengths = [(1, 1), (1, 37), (1, 200), (5, 5), (19, 140), (1, 33)]
    for tile in (SMALL, None):
        check(
            device,
            lengths,
            singles=3,
            heads=(heads, 1),
            dim=dim,
            dtype=dtype,
            tile=tile,
            latents=True,
        )


@pytest.mark.first
@pytest.mark.parametrize("group", broad(range(1, 9), keep=[1, 3, 8]))
def test_any_number_of_query_heads_shares_a_key_head(device: str, group: int) -> None:
    check(device, [(1, 20), (7, 30), (3, 3)], singles=1, heads=(2 * group, 2), dim=16)


@pytest.mark.first
@pytest.mark.parametrize("piece", [None, 64, 128])
def test_pieces_of_any_size_give_the_same(device: str, piece: int | None) -> None:
    check(device, [(1, 1), (1, 64), (1, 0), (1, 65), (1, 300)], singles=5, piece=piece)


def test_rows_may_be_empty(device: str) -> None:
    """As the padding of a captured graph: a row of no tokens, and one that sees no key."""
    check(device, [(0, 0), (3, 9), (0, 5), (2, 2), (0, 0)], singles=0, dim=16)
    q = torch.ones(2, 2, 16, device=device)
    cache = plain_cache(torch.ones(4, 1, 16, device=device), torch.ones(4, 1, 16, device=device))
    none = torch.zeros(2, dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    starts = torch.arange(3, dtype=torch.int32, device=device)
    padding = PagedRows(starts, none, none.long(), table, 4, singles=2)
    assert not launch_paged(q, cache, padding, 1.0).any()
    assert not launch_paged(q, cache, padding, 1.0, piece=64).any()


IMAGES = ((3, 2, 9), (3, 9, 12), (4, 0, 5), (5, 5, 30))
"""Two beside each other, one that is all of a row, one over several blocks."""
RANGED = [(1, 200), (1, 5), (1, 64), (15, 90), (5, 5), (33, 180)]


@pytest.mark.more
@pytest.mark.parametrize(
    ("window", "images"),
    broad(
        product([None, 1, 6, 40, 130], [(), IMAGES]), keep=[(None, IMAGES), (6, ()), (130, IMAGES)]
    ),
)
def test_windows_end_what_is_seen_and_images_see_themselves(
    device: str, window: int | None, images: Sequence[tuple[int, int, int]]
) -> None:
    """Windows smaller than a block of queries, and larger than a piece of keys."""
    check(device, RANGED, singles=3, heads=(2, 1), dim=16, window=window, images=images)


@pytest.mark.more
def test_a_layer_that_is_causal_does_not_see_an_image_whole(device: str) -> None:
    few, shown = [(1, 64), (15, 90)], [(1, 2, 9)]
    check(device, few, singles=1, dim=16, window=40, images=shown, both_ways=False)


@pytest.mark.more
@pytest.mark.parametrize("small", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gemmas_heads_see_windows_and_images(
    device: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the device's own tiles, in pieces of the device's own sizes."""
    monkeypatch.setattr(placement, "generation", lambda _: 80 if small else 90)
    for window in (1024, None):
        check(
            device,
            [(1, 3000), (20, 2600)],
            singles=1,
            heads=(2, 1),
            dim=256,
            dtype=torch.float16,
            window=window,
            images=[(1, 3, 19)],
            tile=None,
            piece=None,
        )


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dim", HEAD_SIZES)
@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn], ids=["as computed", "8 bits"])
def test_windows_and_images_at_every_head_size(
    device: str, dim: int, page: int, kept: torch.dtype | None
) -> None:
    for group in (1, 2, 3, 8):
        for dtype in HALVES if kept else [torch.float32]:
            check(
                device,
                RANGED,
                singles=3,
                heads=(group, 1),
                dim=dim,
                page=page,
                dtype=dtype,
                kept=kept,
                scales=(0.5, 2.0) if kept else (1.0, 1.0),
                tolerance=(2.0 if kept else 1.0) * TOLERANCE[dtype],
                window=70,
                images=IMAGES,
            )


def test_every_row_may_be_prefill(device: str) -> None:
    """A step whose rows of one token are not known to be such."""
    check(device, [(1, 20), (1, 1), (17, 50)], singles=0, dim=16)


@pytest.mark.slow
def test_long_sequences(device: str) -> None:
    check(device, [(1, 5000), (1, 1), (130, 3000), (40, 40)], singles=2, dim=128, tile=None)
    check(device, [(1, 4097), (60, 2049)], singles=1, dim=72, dtype=torch.float16, tile=None)


@pytest.mark.slow
def test_long_sequences_on_pages_of_one_token(device: str) -> None:
    check(device, [(1, 5000), (1, 2), (70, 4999)], singles=2, dim=64, page=1, tile=None)


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn], ids=["as computed", "8 bits"])
def test_every_group_at_every_head_size(
    device: str, dim: int, page: int, kept: torch.dtype | None
) -> None:
    """With empty rows, on pages that rows cross."""
    lengths = [(1, 1), (1, 37), (5, 5), (0, 9), (19, 40), (0, 0)]
    for group in range(1, 9):
        for dtype in HALVES if kept else [torch.float32]:
            factor = 2.0 if kept else 1.0
            check(
                device,
                lengths,
                singles=2,
                heads=(group, 1),
                dim=dim,
                page=page,
                dtype=dtype,
                kept=kept,
                scales=(0.5, 2.0) if kept else (1.0, 1.0),
                tolerance=factor * TOLERANCE[dtype],
            )


@pytest.mark.more
@pytest.mark.parametrize("small", [False, True])
def test_tiles_follow_the_device(device: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of small multiprocessors give the same."""
    monkeypatch.setattr(placement, "generation", lambda _: 80 if small else 90)
    tile = PREFILL_THIN_SMALL if small else PREFILL
    assert prefill_tile(torch.empty(1, 1, 64, dtype=torch.float16)) == tile
    check(device, [(1, 90), (70, 150)], singles=1, heads=(2, 1), dtype=torch.float16, tile=None)


@pytest.mark.more
def test_the_tiles_of_the_device(device: str) -> None:
    check(device, [(1, 90), (70, 150)], singles=1, heads=(2, 1), dim=72, tile=None)
    for dtype in HALVES:
        check(device, [(1, 90), (70, 150)], singles=1, heads=(2, 1), dtype=dtype, tile=None)


def test_a_cache_of_eight_bits_is_read_with_its_scales(device: str) -> None:
    """float8_e4m3fn: three bits of mantissa, exact in 16 bits, so that only the sums differ."""
    check(
        device,
        [(1, 40), (9, 33)],
        singles=1,
        dtype=torch.float16,
        kept=torch.float8_e4m3fn,
        scales=(0.5, 2.0),
        tolerance=2 * TOLERANCE[torch.float16],
    )


def test_large_heads_fit_small_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "generation", lambda _: 89)
    assert prefill_tile(torch.empty(1, 1, 256, dtype=torch.float16)) == PREFILL_LARGE_SMALL
    assert prefill_tile(torch.empty(1, 1, 128, dtype=torch.float16)) == PREFILL_SMALL
    for dtype in (torch.float16, torch.float32):
        tile = prefill_tile(torch.empty(1, 1, 512, dtype=dtype))
        keys_and_values = (tile.stages - 1) * 2 * tile.keys
        assert (tile.rows + keys_and_values) * 512 * dtype.itemsize <= 96 << 10


@pytest.mark.parametrize(
    "kept", [None, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.more)], ids=["16", "8 bits"]
)
def test_heads_of_512_with_the_tiles_of_the_device(device: str, kept: torch.dtype | None) -> None:
    """As Gemma 4's layers that see all: several pieces of a row, eight heads to a key."""
    check(
        device,
        [(1, 700), (1, 3), (20, 130)],
        singles=2,
        heads=(8, 1),
        dim=512,
        dtype=torch.float16,
        kept=kept,
        tile=None,
        piece=None,
        tolerance=2 * TOLERANCE[torch.float16],
    )


def test_layers_of_two_head_sizes_have_lists_and_windows_of_their_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list for each kind of layer, whatever their number; a layer may read another's cache."""
    lists: list[tuple[int, int | None]] = []

    def note(rows: PagedRows, kv_heads: int, window: int | None) -> DecodeWork:
        lists.append((kv_heads, window))
        return share_keys(rows, kv_heads, window=window)

    monkeypatch.setattr("saccade.plugins.gpu.triton.language_attention.share_keys", note)
    order = [(2, 16), (1, 24)] * 2
    windows = (8, None, 8, None)
    kept = KVSpec(
        tuple(
            heads_cache(*each, 1, window=window)
            for each, window in zip(order, windows, strict=True)
        )
    )
    found = []
    for name, ops in (("triton", TritonOps()), ("reference", Ops())):
        place = device if name == "triton" else "cpu"
        batch = decoding(padded(place, [70, 300, 1], 3))
        shapes = [(16 * batch.page_table.numel(), *each) for each in order]
        caches = {
            at: (noise(*each, seed=at).to(place), noise(*each, seed=10 + at).to(place))
            for at, each in enumerate(shapes)
        }
        attention = attention_for(caches, 16, backend=name, ops=ops, kept=kept)
        attention.plan(batch)
        outs = []
        for at, (kv_heads, dim) in enumerate(order):
            cos, sin = rotary_tables(noise(3, dim // 2))
            turned = Rotation(cos.to(place), sin.to(place))
            qkv = noise(3, 4 + 2 * kv_heads, dim, seed=50 + at).to(place)
            outs.append(attention(qkv, turned, None, at).cpu())
            norm = QKNorm(torch.ones((4, dim), device=place), 1e-6)
            q = noise(3, 4, dim, seed=60 + at).to(place)
            outs.append(attention.attend_cached(q, turned, norm, at).cpu())
        found.append(outs)
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0.0)
    assert lists == [(2, 8), (1, None)]


def decoding(rows: PagedRows) -> Batch:
    """A step of these rows."""
    device, count = rows.q_starts.device, rows.singles
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return Batch(
        tokens=torch.zeros(count, dtype=torch.int64, device=device),
        positions=torch.zeros((1, count), dtype=torch.int64, device=device),
        out_slots=16 * rows.page_table[:, 0].long() + rows.kv_lengths - 1,
        slots=rows.lines,
        page_table=rows.page_table,
        q_starts=rows.q_starts,
        kv_lengths=rows.kv_lengths,
        singles=count,
        splice_rows=nothing,
        embeddings=torch.empty(0, device=device),
        sample_rows=nothing,
    )


def padded(device: str, lengths: Sequence[int], lines: int) -> PagedRows:
    """Rows of one token on pages of their own, of a table wide enough for the longest."""
    widest = -(-max(lengths) // 16)
    table = torch.arange(lines * widest, dtype=torch.int32).view(lines, widest)
    return PagedRows(
        torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.arange(len(lengths), device=device),
        table.to(device),
        16,
        len(lengths),
    )


def test_every_piece_is_listed_once_the_largest_first(device: str) -> None:
    """Of 40 rows, more than one program of the list looks at."""
    from triton import cdiv

    lengths = [(197 * at) % 1000 for at in range(37)] + [0, 100_000, 70]
    work = share_keys(padded(device, lengths, 1), 2)
    total, *taken = work.counts.tolist()
    assert taken == [0, 0], "none is taken"
    pieces = [divmod(each, MAX_KV_SPLITS) for each in work.items[:total].tolist()]
    sizes = [max(256, cdiv(cdiv(each, 32), 64) * 64) for each in lengths]
    counts = [max(1, cdiv(each, size)) for each, size in zip(lengths, sizes)]
    assert sorted(pieces) == [(row, at) for row in range(40) for at in range(counts[row])]
    assert max(counts) <= MAX_KV_SPLITS
    listed = [sizes[row] for row, _ in pieces]
    assert listed == sorted(listed, reverse=True)
    for row, begins in enumerate(work.begins.tolist()):
        assert pieces[begins : begins + counts[row]] == [(row, at) for at in range(counts[row])]


def test_a_long_row_costs_its_window(device: str) -> None:
    """Of 100,000 keys a decoding row's pieces hold the last 1,024, as those of a row of 1,024."""
    rows = padded(device, [100_000, 1024, 30], 1)
    counts = [share_keys(rows, 2, window=window).counts[0].item() for window in (None, 1024, 64)]
    assert counts == [32 + 4 + 1, 4 + 4 + 1, 3]
    assert len(share_keys(rows, 2, window=1024).items) == 3 * 4, "room for what they have at most"


def test_a_block_of_a_prompt_costs_its_window(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,600 keys, a block of 16 tokens reads those of its window alone; in the middle of the
    window, without masks.
    """
    if device != "cpu":
        pytest.skip("the interpreter counts")
    read: list[bool] = []

    def attend(*args: Any) -> Any:
        read.append(args[5] is None)
        return attend_block(*args)

    monkeypatch.setattr("saccade.plugins.gpu.triton.paged.attend_block", attend)
    for window in (None, 256):
        read.clear()
        check(device, [(16, 1600)], singles=0, heads=(1, 1), dim=16, window=window, piece=1 << 13)
        assert (len(read), sum(read)) == ((100, 99) if window is None else (17, 15))


@pytest.mark.more
def test_a_row_has_the_same_bits_whatever_is_beside_it(device: str) -> None:
    """Alone, among short ones, beside a long one; at any number of programs."""
    lengths = [700, 3, 2000, 64, 300]
    rows = padded(device, lengths, 5)
    slots = 16 * rows.page_table.numel()
    keys, values = (noise(slots, 2, 64, seed=seed).to(device) for seed in (3, 4))
    cache, q = plain_cache(keys, values), noise(5, 8, 64, seed=5).to(device)
    together = launch_paged(q, cache, rows, 0.125)
    for row in range(5):
        alone = replace(
            rows,
            q_starts=rows.q_starts[:2],
            kv_lengths=rows.kv_lengths[row : row + 1],
            lines=rows.lines[row : row + 1],
            singles=1,
        )
        mine = launch_paged(q[row : row + 1], cache, alone, 0.125)
        assert torch.equal(mine[0], together[row]), f"row of {lengths[row]}"


@pytest.mark.more
def test_a_list_serves_every_layer_of_a_step(device: str) -> None:
    """What was taken in one layer is there again in the next."""
    rows = padded(device, [70, 300, 1, 600], 4)
    rows = replace(rows, work=share_keys(rows, 2))
    slots = 16 * rows.page_table.numel()
    q = noise(4, 4, 32, seed=5).to(device)
    for layer in range(2):
        keys, values = (noise(slots, 2, 32, seed=seed + layer).to(device) for seed in (3, 4))
        cache = plain_cache(keys, values)
        wanted = paged_attention_reference(q.double(), cache, rows, 0.2)
        ours = launch_paged(q, cache, rows, 0.2).double()
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE[torch.float32], rtol=0.0)


def test_keys_are_split_where_tokens_are_few() -> None:
    """50 tokens over 29k: 2 blocks of 8 key heads in 8 pieces are 128 programs."""
    assert [prefill_splits(tokens, 1 << 15, 1024) for tokens in (50, 64, 128, 256, 512)] == [
        *(8, 8, 4, 2, 1)
    ]
    assert prefill_splits(50, 1000, 1024) == 1, "no row has two pieces"
