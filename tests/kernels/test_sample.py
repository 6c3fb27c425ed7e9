"""The sampling kernel beside the sampler that CPUs run, without a GPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.core.plan import Open
from saccade.core.types import SamplingParams
from saccade.kernels import device as placement
from saccade.kernels.reference.ops import Ops
from saccade.runtime.row_parts import Draws
from saccade.runtime.sampling.sampler import Sampler, uniform

pytest.importorskip("triton")
from saccade.kernels.reference.sample import NEUTRAL, SamplingRows
from saccade.plugins.gpu.triton import sample as sample_gpu
from saccade.plugins.gpu.triton.ops import TritonOps
from saccade.plugins.gpu.triton.sample import launch_sample
from tests.kernels.conftest import broad

VOCAB = 300
WORDS = -(-VOCAB // 32)


def draw(
    device: str,
    logits: torch.Tensor,
    asked: list[SamplingParams],
    masks: torch.Tensor | None = None,
    masked: list[int] | None = None,
) -> tuple[list[int], list[int]]:
    """Tokens that the sampler draws (by the kernel, by PyTorch) from a row of logits each."""
    rows = len(asked)
    found = []
    for place, by_kernel in ((device, True), ("cpu", False)):
        ops = TritonOps() if by_kernel else Ops()
        sampler = Sampler(VOCAB, rows, (7,), torch.device(place), ops)
        for slot, params in enumerate(asked):
            # Another sequence was there before.
            before = SamplingParams(temperature=0.8, top_k=2)
            sampler.open(Open(slot, (1,), 1, (), (), before, ()))
            sampler.close(slot)
            sampler.open(Open(slot, (1, 3, 3), 1, (), (), params, ()))
        points = torch.tensor([uniform(p.seed, 7) for p in asked], dtype=torch.float64)
        slots = torch.arange(rows, device=place)
        draws = Draws(range(rows), [7] * rows, slots, points.to(place))
        there = None if masks is None else masks.to(place)
        tokens, _ = sampler(logits.to(place, copy=True), draws, there, masked)
        found.append(tokens.tolist())
    return found[0], found[1]


def noise(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.more
@pytest.mark.parametrize("seed", broad(range(2), keep=[0]))
def test_every_way_to_draw_gives_the_samplers_token(device: str, seed: int) -> None:
    ways = [
        dict[str, float](),
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-4},
        {"temperature": 1.0, "top_k": VOCAB + 5},
        {"temperature": 0.5, "min_p": 0.25, "top_p": 0.7},
        {"temperature": 0.5, "min_p": 0.2, "top_k": 30, "top_p": 0.5},
        {"temperature": 2.0, "min_p": 0.05, "top_p": 0.5},
        {"temperature": 2.0, "min_p": 0.3, "top_k": 9},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.6},
        {"temperature": 1e-3},
        {"temperature": 2.0, "top_p": 0.99},
    ]
    asked = [SamplingParams(**way, seed=seed) for way in ways]  # type: ignore[arg-type]
    ours, theirs = draw(device, noise(len(asked)), asked)
    assert ours == theirs
    assert len(set(ours)) > len(asked) // 3  # they do not all draw the best


def test_a_mask_is_kept(device: str) -> None:
    asked = [SamplingParams(temperature=t, seed=s) for t in (0.0, 1.5) for s in range(6)]
    allowed = torch.zeros(len(asked), WORDS, dtype=torch.int32)
    allowed[:, 0] = 0b10010
    allowed[:, 4] = -(2**31)  # token 159
    allowed[3:5] = 0
    allowed[3:5, 9] = 1  # token 288
    ours, theirs = draw(device, noise(len(asked), seed=1), asked, allowed)
    assert ours == theirs
    assert set(ours) <= {1, 4, 159, 288} and ours[3] == ours[4] == 288


@pytest.mark.more
def test_a_search_reads_a_row_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bisection over all 32 bits would read it 31 times, for a share and for the token."""
    if torch.cuda.is_available():
        pytest.skip("counted in the interpreter")
    passes, masses = list[int](), sample_gpu.masses
    monkeypatch.setattr(sample_gpu, "masses", lambda *given: passes.append(1) or masses(*given))
    for way, most in (({}, 5), ({"top_p": 0.9}, 10), ({"top_p": 0.9, "top_k": 20}, 18)):
        passes.clear()
        asked = [SamplingParams(temperature=1.0, seed=seed, **way) for seed in range(4)]  # type: ignore[arg-type]
        ours, theirs = draw("cpu", noise(len(asked), seed=5), asked)
        assert ours == theirs
        assert 0 < len(passes) <= most * len(asked)


LARGE = 20_000
WAYS = [(1.0, 0, 1.0, 0.0), (1.0, 0, 0.95, 0.0), (0.7, 20, 0.8, 0.0), (1.0, 0, 1.0, 0.05)]


def large(rows: int, shape: str) -> torch.Tensor:
    """Logits of several blocks."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, LARGE, generator=generator)
    if shape == "40 stand out":
        logits[:, torch.randperm(LARGE, generator=generator)[:40]] *= 8.0
    elif shape == "zipf":
        ranks = torch.stack([torch.randperm(LARGE, generator=generator) for _ in range(rows)])
        logits = -(1.0 + ranks).log()
    return logits


def asked(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots, their table, and points."""
    points = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return torch.arange(rows) % len(WAYS), torch.tensor(WAYS), points


@pytest.mark.more
@pytest.mark.parametrize("shape", ["40 stand out", "zipf"])
def test_likely_tokens_of_many_blocks_give_the_samplers_token(device: str, shape: str) -> None:
    rows = 2 * len(WAYS)
    logits, (slots, table, points) = large(rows, shape), asked(rows)
    given = (each.to(device) for each in (logits, slots, table, points))
    columns = [WAYS[slot] for slot in slots.tolist()]
    expected = Ops().sample(logits.clone(), SamplingRows(columns, table, slots, points))
    assert launch_sample(*given).tolist() == expected.tolist()


@pytest.mark.more
@pytest.mark.parametrize(
    ("shape", "passes"), [("40 stand out", 4.0), ("zipf", 10.0), ("flat", None)]
)
def test_likely_tokens_are_searched_apart_and_give_the_tokens_of_the_whole_row(
    monkeypatch: pytest.MonkeyPatch, shape: str, passes: float | None
) -> None:
    """passes: the maximum that a row is read, on average."""
    if torch.cuda.is_available():
        pytest.skip("counted in the interpreter")
    rows = 2 * len(WAYS)
    logits, read = large(rows, shape), [0]
    block_of = sample_gpu.row_block

    def counted(logits: Any, masks: Any, free: Any, at: Any, vocab: Any, *given: Any) -> Any:
        read[0] += min(int(vocab) - int(at), int(given[0]))
        return block_of(logits, masks, free, at, vocab, *given)

    def drawn() -> list[int]:
        slots, table, points = asked(rows)
        return launch_sample(logits, slots, table, points).tolist()

    monkeypatch.setattr(sample_gpu, "row_block", counted)
    ours, found = drawn(), read[0] / LARGE / rows
    monkeypatch.setattr(sample_gpu, "among", lambda *_: False)
    read[0] = 0
    assert ours == drawn()
    before = read[0] / LARGE / rows - 1  # without the pass for the candidates
    assert found <= passes if passes else found <= before + 1


@pytest.mark.more
def test_equal_logits_share_the_draw_evenly_by_their_place(device: str) -> None:
    logits = torch.full((15, VOCAB), -50.0)
    logits[:, 10:14] = 2.0
    logits[:, 200] = 2.0
    points = [(i + 0.5) / 15 for i in range(15)]
    ours = launch_sample(
        logits.to(device),
        torch.zeros(15, dtype=torch.int64, device=device),
        torch.tensor([NEUTRAL], device=device),
        torch.tensor(points, dtype=torch.float64, device=device),
    ).tolist()
    assert ours == [(10, 11, 12, 13, 200)[int(point * 5)] for point in points]


@pytest.mark.parametrize("edit", [{}, {"min_tokens": 9, "repetition_penalty": 1.3}])
def test_some_rows_have_masks_and_others_none(device: str, edit: dict[str, Any]) -> None:
    """Row 4 may draw nothing but an end, which `min_tokens` bans elsewhere."""
    asked = [SamplingParams(temperature=t, seed=s, **edit) for s, t in enumerate((0, 1, 2, 0, 1))]
    allowed = torch.zeros(3, WORDS, dtype=torch.int32)
    allowed[0, 3] = 0b11
    allowed[1, :] = -1
    allowed[2, 0] = 1 << 7
    logits = noise(len(asked), seed=2)
    logits[:, 7] = 20.0
    ours, theirs = draw(device, logits, asked, allowed, [1, 3, 4])
    assert ours == theirs
    assert ours[1] in (96, 97) and ours[4] == 7 and (ours[0] == 7) == (not edit)


def test_a_server_of_many_slots_draws_the_same(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In smaller blocks, whatever the number of rows."""
    monkeypatch.setattr(sample_gpu, "BLOCK", 64)
    blocks: list[int] = []
    row_block = sample_gpu.row_block

    def seen(*given: Any) -> Any:
        blocks.append(given[5])
        return row_block(*given)

    asked = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(3)]
    for processors, block in ((3, 64), (2, 32)):
        monkeypatch.setattr(placement, "multiprocessors", lambda _, count=processors: count)
        if device == "cpu":
            monkeypatch.setattr(sample_gpu, "row_block", seen)
        ours, theirs = draw(device, noise(len(asked)), asked)
        assert ours == theirs
        assert {int(each) for each in blocks} <= {block}
        blocks.clear()


@pytest.mark.parametrize("point", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_range_draw_the_first_and_the_last(device: str, point: float) -> None:
    logits = noise(1)
    ours = launch_sample(
        logits.to(device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.tensor([[1.0, 20, 1.0, 0.0]], device=device),
        torch.tensor([point], dtype=torch.float64, device=device),
    ).item()
    best = logits[0].topk(20).indices.tolist()
    assert ours == (best[0] if point == 0.0 else best[-1])


def test_the_best_of_equals_is_the_first(device: str) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 250]] = 1.0
    ours, _ = draw(device, logits, [SamplingParams()])
    assert ours == [40]
