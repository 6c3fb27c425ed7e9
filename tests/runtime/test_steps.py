"""Steps through graphs: the same tokens, the graph that fits, padding that touches nothing, and no
capture once requests come.

A capture without CUDA is the function itself, on the same buffers as a graph would have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.config import StepGraphSizes
from saccade.core.metrics import Metrics
from saccade.core.plan import ADAPT, Plan
from saccade.core.types import Request
from saccade.kernels.reference.paged import ReferenceAttention
from saccade.plugins.gpu.cuda import graphs
from saccade.plugins.gpu.cuda.graphs import Replay, eager
from saccade.runtime.attention import PagedAttention
from saccade.runtime.batch import Frame
from saccade.runtime.worker import Worker
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.tiny import picture

SIZES = (1, 2, 4)
PROMPTS = {"a": [5, 9, 13, 17, 21], "b": [7] * 20, "c": [8, 30], "d": [5, 9, 13, 17, 40], "e": [3]}


class Counting:
    """A capture that counts."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, work: Replay) -> Replay:
        self.captured += 1
        return eager(work)


def answers(over: Harness, names: str, between: Callable[[Plan], None] | None = None) -> object:
    """Those of the prompts `names`; the first has the shortest answer."""
    asked = [
        over.request(name, PROMPTS[name], max_tokens=4 + 2 * at, temperature=at % 2, seed=at)
        for at, name in enumerate(names)
    ]
    return {name: outcome.tokens for name, outcome in over.run(asked, between).items()}


def replays(metrics: Metrics) -> dict[int, float]:
    return {n: metrics.value("saccade_graph_replays_total", rows=str(n)) for n in SIZES}


@pytest.mark.first
def test_a_graph_changes_no_answer_and_none_is_captured_for_a_request(
    family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_threads()
    net, metrics, capture = load(checkpoint(family)), Metrics(), Counting()
    monkeypatch.setattr(graphs, "eager", capture)
    plain, graphed = (Harness(net, page_size=4, chunk_tokens=16) for _ in range(2))
    graphed.config = Harness(net, page_size=4, chunk_tokens=16, graphs=StepGraphSizes(SIZES)).config
    capture.captured = 0
    graphed.worker = Worker(net, graphed.config, graphed.arena, metrics=metrics)
    assert capture.captured == len(SIZES)
    kinds: list[int] = []

    def note(plan: Plan) -> None:
        decoding = all(row.length == 1 and row.start > len(PROMPTS["b"]) for row in plan.rows)
        kinds.append(len(plan.rows) if decoding else 0)

    for names in ("abcde", "bbb"[:1], "acd"):
        assert answers(graphed, names, note) == answers(plain, names)
    assert capture.captured == len(SIZES)
    seen = replays(metrics)
    assert all(seen.values()), "each of them served"
    assert sum(seen.values()) < len(kinds), "prompts, and five rows at once, run without"


def test_padding_writes_to_the_dummy_page_alone(checkpoint: Callable[..., Path]) -> None:
    set_threads()
    net = load(checkpoint("qwen3_vl"))
    over = Harness(net, page_size=4, kv_pages=40, graphs=StepGraphSizes((4,)), prefix_cache=False)
    assert isinstance(over.worker, Worker)
    attention = over.worker._attention
    assert isinstance(attention, PagedAttention)
    (backend,) = attention._each
    assert isinstance(backend, ReferenceAttention)
    for cache in attention._caches.values():
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    answered = answers(over, "c")
    for cache in attention._caches.values():
        written = cache.keys[4:, 0, 0].isfinite().sum()
        assert written == len(PROMPTS["c"]) + 4 - 1, "its own tokens, but the one drawn last"
    assert answered == answers(Harness(net), "c")


MIXED = StepGraphSizes((1, 2, 4), mixed_rows=(0, 2, 4), mixed_tokens=(8, 16, 32))


def traffic(over: Harness, seed: int) -> list[Request]:
    """Prompts of any length, some with images, some scored, some with the beginning of another."""
    rng = np.random.default_rng(seed)
    spec: Any = over.net.spec
    factor = spec.images.factor
    asked: list[Request] = []
    for at in range(6):
        tokens = [int(each) for each in rng.integers(5, 60, rng.integers(1, 30))]
        shown = []
        if rng.random() < 0.5:
            name = int(rng.integers(3))
            tokens.insert(len(tokens) // 2, spec.image_token_id)
            shown = [
                over.image(
                    np.ascontiguousarray(picture((2 + name) * factor, 3 * factor, seed=name)),
                    str(name),
                )
            ]
        elif rng.random() < 0.3 and asked:
            tokens = [*asked[0].tokens[:9], *tokens]
        scored = {"prompt_logprobs": 2} if rng.random() < 0.3 else {}
        length = int(rng.integers(1, 6))
        asked.append(
            over.request(
                str(at), tokens, shown, max_tokens=length, temperature=at % 2, seed=at, **scored
            )
        )
    return asked


@pytest.mark.first
def test_steps_with_prompts_in_graphs_give_the_same_answers(
    family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_threads()
    net, metrics, capture = load(checkpoint(family)), Metrics(), Counting()
    monkeypatch.setattr(graphs, "eager", capture)
    plain, graphed = (Harness(net, page_size=4, chunk_tokens=20) for _ in range(2))
    config = Harness(net, page_size=4, chunk_tokens=20, graphs=MIXED).config
    capture.captured = 0
    graphed.worker = Worker(net, config, graphed.arena, metrics=metrics)
    assert capture.captured == MIXED.count == 12
    chunks = 0

    def note(plan: Plan) -> None:
        nonlocal chunks
        chunks += any(row.length > 1 for row in plan.rows)

    for seed in range(4):
        expected = plain.run(traffic(plain, seed))
        found = graphed.run(traffic(graphed, seed), note)
        for name, outcome in expected.items():
            assert found[name].tokens == outcome.tokens
            assert found[name].cached_tokens == outcome.cached_tokens
            for ours, theirs in zip(found[name].scores, outcome.scores, strict=True):
                assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-4)
    assert capture.captured == MIXED.count
    mixed = {
        singles + tokens: metrics.value(
            "saccade_mixed_graph_replays_total", tokens=str(singles + tokens)
        )
        for singles in MIXED.mixed_rows
        for tokens in MIXED.mixed_tokens
    }
    assert sum(mixed.values()) >= chunks > 20, "every chunk fits one"
    assert sum(map(bool, mixed.values())) > 5, "of many sizes"
    assert sum(replays(metrics).values()) > 5


@pytest.mark.first
def test_deferred_graphs_are_captured_while_idle_or_when_often_missing(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start captures the graphs of decoding, and one with prompts for each number of rows."""
    set_threads()
    net, capture = load(checkpoint("qwen3_vl")), Counting()
    monkeypatch.setattr(graphs, "eager", capture)
    limits: dict[str, Any] = {"page_size": 4, "chunk_tokens": 20, "prefix_cache": False}
    plain, idle, busy = (Harness(net, **limits) for _ in range(3))
    config = Harness(net, **limits, graphs=replace(MIXED, defer=True)).config

    def tokens(over: Harness) -> list[dict[str, list[int]]]:
        return [
            {name: [*each.tokens] for name, each in over.run(traffic(over, seed)).items()}
            for seed in range(4)
        ]

    expected, at_start = tokens(plain), len(MIXED.rows) + len(MIXED.mixed_rows)
    for over in (idle, busy):
        capture.captured = 0
        over.worker = Worker(net, config, over.arena)
        assert capture.captured == at_start
    while idle.worker.execute(Plan(0, change=ADAPT)).unfinished:
        capture.captured += 1  # so that each plan counts twice
    assert capture.captured == at_start + 2 * (MIXED.count - at_start) - 1
    assert tokens(idle) == expected
    capture.captured = 0
    monkeypatch.setattr(graphs, "MISSES", 0)
    assert tokens(busy) == expected
    assert 0 < capture.captured <= MIXED.count - at_start


@pytest.mark.parametrize(
    ("decoding", "rows", "tokens", "frame"),
    [
        (2, 2, 2, Frame.decode(2)),
        (3, 3, 3, Frame.decode(4)),
        (5, 5, 5, None),
        (0, 1, 7, Frame.mixed(0, 8)),
        (0, 1, 8, Frame.mixed(0, 16)),
        (1, 2, 8, Frame.mixed(2, 8)),
        (3, 5, 10, Frame.mixed(4, 16)),
        (2, 6, 10, Frame.mixed(2, 32)),
        (2, 7, 12, None),
        (5, 6, 9, None),
        (0, 1, 32, None),
    ],
)
def test_a_step_has_the_smallest_frame_that_it_fits(
    checkpoint: Callable[..., Path], decoding: int, rows: int, tokens: int, frame: Frame | None
) -> None:
    """One token of a mixed frame always pads, and every eight make room for a row."""
    over = Harness(load(checkpoint("qwen3_vl")), page_size=4, kv_pages=40, graphs=MIXED)
    assert isinstance(over.worker, Worker) and over.worker._graphs
    assert over.worker._graphs.frame(decoding, rows, tokens) == frame


def test_padding_of_prompts_writes_to_the_dummy_page_alone(
    checkpoint: Callable[..., Path],
) -> None:
    set_threads()
    net = load(checkpoint("qwen3_vl"))
    sizes = StepGraphSizes((), (4,), (32,))
    over = Harness(net, page_size=4, kv_pages=40, graphs=sizes, prefix_cache=False)
    assert isinstance(over.worker, Worker) and isinstance(over.worker._attention, PagedAttention)
    caches = over.worker._attention._caches.values()
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    answered = answers(over, "b")
    for cache in caches:
        written = cache.keys[4:, 0, 0].isfinite().sum()
        assert written == len(PROMPTS["b"]) + 4 - 1, "its own tokens, but the one drawn last"
    assert answered == answers(Harness(net), "b")
