"""The language model's attention over pages, against float64 written out with explicit masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from saccade.core.errors import ConfigError
from saccade.core.family import AttentionShape, KVSpec, latent_cache
from saccade.kernels.language_attention import REFERENCE, LanguageAttention, possible
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference import attention, sdpa
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.rotary import Rotation, rotary_tables
from saccade.nn.protocol import Batch
from saccade.runtime.attention import attention_for, pick_attention
from tests.kernels.test_attention import expected

PAGES, KV_HEADS, DIM = 96, 2, 16
SCALE = DIM**-0.5
SHAPE = AttentionShape(KV_HEADS, DIM)
RANGES = (SHAPE, replace(SHAPE, window=8))


class Case:
    """Sequences with (query rows, tokens in all), on pages in order or anywhere."""

    def __init__(
        self, lengths: list[tuple[int, int]], page_size: int, scattered: bool, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.page_size = page_size
        shape = (PAGES * page_size, KV_HEADS, DIM)
        self.caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        rows = sum(length for length, _ in lengths)
        self.q = torch.randn(rows, 3 * KV_HEADS, DIM, generator=generator).to(dtype)
        self.new = [
            torch.randn(rows, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2)
        ]
        order = torch.randperm(PAGES, generator=generator) if scattered else torch.arange(PAGES)
        self.lengths = lengths
        table = torch.full((len(lengths) + 1, PAGES), 1 << 30, dtype=torch.int32)
        self.slots, used = [], 0  # kv slots of each sequence's tokens
        for line, (_, total) in enumerate(lengths):
            count = -(-total // page_size)
            pages = order[used : used + count]
            table[line + 1, :count] = pages
            used += count
            slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
            self.slots.append(slots[:total])
        starts = torch.tensor([0, *(length for length, _ in lengths)]).cumsum(0)
        totals = [total for _, total in lengths]
        self.starts = starts.tolist()
        self.out = torch.cat([slots[-length:] for slots, (length, _) in zip(self.slots, lengths)])
        nothing = torch.empty(0, dtype=torch.int64)
        self.batch = Batch(
            tokens=torch.zeros(rows, dtype=torch.int64),
            positions=torch.zeros((3, rows), dtype=torch.int64),
            out_slots=self.out,
            slots=torch.arange(1, len(lengths) + 1),
            page_table=table,
            q_starts=starts.int(),
            kv_lengths=torch.tensor(totals, dtype=torch.int32),
            singles=[length == 1 for length, _ in lengths].count(True),
            splice_rows=nothing,
            embeddings=torch.empty(0),
            sample_rows=nothing,
        )

    def attend(
        self,
        name: str = "auto",
        kept: KVSpec | None = None,
        images: Sequence[int] = (),
    ) -> torch.Tensor:
        """images: rows of the batch that are of images."""
        return self.attend_in_layers(name, kept, images)[0]

    def attend_in_layers(
        self,
        name: str = "auto",
        kept: KVSpec | None = None,
        images: Sequence[int] = (),
    ) -> list[torch.Tensor]:
        """One step, in each of the layers, which share their caches."""
        layers = range(len(kept.shapes) if kept else 1)
        caches = dict.fromkeys(layers, (self.caches[0], self.caches[1]))
        ours = attention_for(caches, self.page_size, backend=name, kept=kept)
        ours.plan(replace(self.batch, splice_rows=torch.tensor(images, dtype=torch.int64)))
        still = Rotation(*rotary_tables(torch.zeros(len(self.q), DIM // 2)))
        return [ours(torch.cat((self.q, *self.new), dim=1), still, None, layer=i) for i in layers]


@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 33)],
        [(20, 20)],
        [(9, 31)],
        [(1, 1), (1, 40), (7, 7), (5, 30)],
        [(1, 5), (1, 33), (1, 1), (1, 12)],
    ],
)
def test_queries_see_their_own_past_and_nothing_else(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    page_size: int,
    scattered: bool,
) -> None:
    case = Case(lengths, page_size, scattered, dtype)
    out = case.attend()
    assert out.dtype == dtype
    for index, (length, total) in enumerate(lengths):
        rows = slice(case.starts[index], case.starts[index + 1])
        mask = torch.ones(length, total, dtype=torch.bool).tril(total - length)
        keys, values = (cache[case.slots[index]] for cache in case.caches)
        wanted = expected(case.q[rows], keys, values, mask)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[rows].double(), wanted, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("few", [0, 16, 1 << 10], ids=["none", "some", "all"])
def test_sequences_that_decode_after_few_tokens_share_a_call(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [(1, n) for n in (5, 16, 3, 8, 30, 2, 9, 7, 1, 17)] + [(3, 8), (1, 7)]
    monkeypatch.setattr(sdpa, "ABREAST_VALUES", 1 << 20)
    wanted = Case(lengths, 4, True, torch.float32).attend()
    calls = Calls(attention.decode_attention)
    monkeypatch.setattr(sdpa, "decode_attention", calls)
    monkeypatch.setattr(sdpa, "ABREAST_VALUES", few * KV_HEADS * DIM)
    found = Case(lengths, 4, True, torch.float32).attend()
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0.0)
    assert calls.rows == {0: [], 16: [4, 4], 1 << 10: [10]}[few]


class Calls:
    """Counts the rows of each call."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function
        self.rows: list[int] = []

    def __call__(self, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.rows.append(len(q))
        return self.function(q, *rest)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("lengths", [[(4, 20), (1, 9)], [(1, 9), (1, 18), (1, 3), (1, 1)]])
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_lies_in_other_slots_does_not_matter(
    page_size: int, lengths: list[tuple[int, int]], name: str
) -> None:
    before = Case(lengths, page_size, True, torch.float32)
    wanted = before.attend(name)
    after = Case(lengths, page_size, True, torch.float32)
    others = torch.ones(PAGES * page_size, dtype=torch.bool)
    for slots in after.slots:
        others[slots] = False
    for cache in after.caches:
        cache[others] = torch.nan
    assert torch.equal(after.attend(name), wanted)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("lengths", [[(4, 20), (1, 9)], [(1, 9), (1, 18), (1, 3), (1, 1)]])
def test_caches_may_be_views_of_one_tensor(
    lengths: list[tuple[int, int]], scattered: bool, name: str
) -> None:
    wanted = Case(lengths, 4, scattered, torch.float32).attend(name)
    case = Case(lengths, 4, scattered, torch.float32)
    case.caches = [*torch.stack((torch.zeros_like(case.caches[0]), *case.caches))[1:]]
    assert all(cache.storage_offset() for cache in case.caches)
    assert torch.equal(case.attend(name), wanted)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_keys_and_values_are_cached_in_their_slots_only(name: str) -> None:
    case = Case([(3, 10), (1, 2)], 4, True, torch.float32)
    before = [cache.clone() for cache in case.caches]
    case.attend(name)
    others = torch.ones(PAGES * 4, dtype=torch.bool)
    others[case.out] = False
    for cache, was, new in zip(case.caches, before, case.new):
        assert torch.equal(cache[case.out], new) and torch.equal(cache[others], was[others])


@pytest.mark.parametrize("both_ways", [True, False], ids=["both ways", "causal"])
@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize("shown", [False, True], ids=["text", "images"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("sdpa", torch.float32), ("reference", torch.float32), ("auto", torch.bfloat16)],
    ids=["sdpa", "reference", "16 bits"],
)
def test_windows_end_what_is_seen_and_images_see_themselves(
    name: str,
    dtype: torch.dtype,
    shown: bool,
    window: int | None,
    both_ways: bool,
) -> None:
    """Of a row of 20 tokens behind 13 cached ones the tokens 2 to 9 and 11 to 16 are two images;
    another row begins within its image. A layer beside theirs is of the other kind.
    """
    lengths = [(1, 40), (1, 3), (20, 33), (9, 9), (5, 12)]
    case = Case(lengths, 4, True, dtype)
    runs = [(2, 2, 10), (2, 11, 17), (4, 0, 3)] if shown else []
    rows = [case.starts[row] + at for row, start, end in runs for at in range(start, end)]
    kinds = (not both_ways, both_ways)
    kept = KVSpec(tuple(replace(SHAPE, window=window, both_ways=each) for each in kinds))
    out = case.attend_in_layers(name, kept, rows)[1]
    for index, (length, total) in enumerate(lengths):
        at, place = torch.arange(total), torch.arange(total - length, total)[:, None]
        mask = at <= place
        for row, start, end in runs:
            if row == index and both_ways:
                within = slice(total - length + start, total - length + end)
                mask[start:end, within] = True
        if window is not None:
            mask &= at > place - window
        mine = slice(case.starts[index], case.starts[index + 1])
        keys, values = (cache[case.slots[index]] for cache in case.caches)
        wanted = expected(case.q[mine], keys, values, mask)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[mine].double(), wanted, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_within_its_window_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    """Beside one that is longer than the window, and one with an image."""
    kept = KVSpec((replace(SHAPE, window=40, both_ways=True),))
    for lengths, rows in (([(1, 33)], range(1)), ([(9, 31)], range(9))):
        alone = Case([*lengths], 4, True, dtype).attend(kept=kept)
        company = Case([*lengths, (1, 60), (7, 9)], 4, True, dtype)
        first = Case([*lengths], 4, True, dtype)
        company.q[: len(rows)] = first.q
        for index, slots in enumerate(first.slots):
            for mine, theirs, new, told in zip(
                company.caches, first.caches, company.new, first.new, strict=True
            ):
                mine[company.slots[index]] = theirs[slots]
                new[: len(rows)] = told
        images = [company.starts[2] + 1, company.starts[2] + 2]
        assert torch.equal(company.attend(kept=kept, images=images)[: len(rows)], alone)


@pytest.mark.parametrize("page_size", [1, 4])
def test_backends_agree(page_size: int) -> None:
    lengths = [(1, 1), (1, 40), (7, 7), (5, 30)]
    ours = Case(lengths, page_size, True, torch.float32)
    theirs = Case(lengths, page_size, True, torch.float32)
    torch.testing.assert_close(ours.attend("reference"), theirs.attend("sdpa"), atol=1e-5, rtol=0.0)


CPU = torch.device("cpu")


def test_auto_takes_the_first_backend_that_runs() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        names = possible(pick_ops(CPU, dtype).attention, CPU, dtype)
        assert "triton" not in names and names[-2:] == ("sdpa", "reference")
        assert pick_attention("auto", pick_ops(CPU, dtype), CPU, dtype) == names[0]
    assert possible(REFERENCE, CPU, torch.float32)[0] == "sdpa"
    assert pick_attention("auto", Ops(), CPU, torch.float32, graphs=True) == "reference"


@pytest.mark.parametrize("name", ["triton", "x86", "sdap"])
def test_a_backend_that_does_not_run_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pick_attention(name, Ops(), CPU, torch.float32)
    assert str(refused.value) == (
        f"--attention-backend {name}: it does not run on cpu in float32; available are "
        "auto, sdpa, reference"
    )


def test_windows_are_refused_by_name_where_a_backend_does_not_know_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pick_attention("auto", Ops(), CPU, torch.float32, shapes=RANGES) == "sdpa"
    lacking = replace(REFERENCE["sdpa"], knows=frozenset())
    monkeypatch.setattr(Ops, "attention", {**REFERENCE, "sdpa": lacking})
    with pytest.raises(ConfigError, match=r"sdpa: the model's layers have windows.*reference$"):
        pick_attention("sdpa", Ops(), CPU, torch.float32, shapes=RANGES)


def test_every_device_has_a_backend_that_knows_windows() -> None:
    """Also where steps are graphs, as on a GPU."""
    on_gpu = pytest.importorskip("saccade.plugins.gpu.triton.ops").TritonOps()
    for ops in (Ops(), on_gpu):
        for graphs in (False, True):
            names = possible(ops.attention, CPU, torch.bfloat16, graphs=graphs, shapes=RANGES)
            assert names, f"{ops.name}, graphs: {graphs}"
    picked = pick_attention("auto", on_gpu, CPU, torch.bfloat16, graphs=True, shapes=RANGES)
    assert picked == "triton"


def test_a_backend_that_is_no_graph_is_refused_where_steps_are_graphs() -> None:
    with pytest.raises(
        ConfigError, match=r"sdpa: its steps cannot be captured.*--disable-cuda-graph"
    ):
        pick_attention("sdpa", Ops(), CPU, torch.float32, graphs=True)


def test_a_backend_is_one_more_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned once a step and called in each layer, with the queries and that one's cache."""
    told: list[str] = []

    class Zeros:
        def plan(self, rows: object) -> None:
            told.append("plan")

        def __call__(self, q: torch.Tensor, cache: object) -> torch.Tensor:
            told.append("layer")
            return torch.zeros_like(q)

    row = LanguageAttention(lambda _: Zeros(), captured=True)
    monkeypatch.setattr(Ops, "attention", {"zeros": row})
    case = Case([(1, 9), (4, 20)], 4, True, torch.float32)
    assert not case.attend("zeros").any() and told == ["plan", "layer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [[(1, 40), (1, 7)], [(30, 70)], [(1, 5), (9, 9), (300, 310)]])
def test_latents_are_keys_and_values_of_all_heads(
    lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Of the published width, 512 + 64 values, on every backend of this machine."""
    heads, width = 16, 576
    case = Case(lengths, 4, True, dtype)
    generator = torch.Generator().manual_seed(1)
    kept = torch.randn(PAGES * 4, 1, width, generator=generator).to(dtype)
    q, new = (torch.randn(len(case.q), n, width, generator=generator) for n in (heads, 1))
    q, new, spec = q.to(dtype), new[:, 0].to(dtype), KVSpec((latent_cache(width),))
    for name in possible(
        pick_ops(CPU, dtype).attention, CPU, dtype, shapes=spec.attention.values()
    ):
        mine = kept.clone()
        ours = attention_for({0: (mine, mine)}, 4, backend=name, kept=spec)
        ours.plan(case.batch)
        out = ours.over_latents(q.clone(), new, 0)
        torch.testing.assert_close(mine[case.out, 0], new, atol=0.0, rtol=0.0)
        for index, (length, total) in enumerate(lengths):
            rows = slice(case.starts[index], case.starts[index + 1])
            seen = mine[case.slots[index], 0].double()
            scores = torch.einsum("qhl,kl->hqk", q[rows].double(), seen) * width**-0.5
            hidden = torch.ones(length, total, dtype=torch.bool).triu(total - length + 1)
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            wanted = torch.einsum("hqk,kl->qhl", shares, seen)
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(out[rows].double(), wanted, atol=tolerance, rtol=0.0)
