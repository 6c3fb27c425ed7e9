"""Steps that only decode through graphs: the same tokens, the graph that fits, padding that touches
nothing, and no capture once requests come.

A capture without CUDA is the function itself, on the same buffers as a graph would have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from saccade.core.metrics import Metrics
from saccade.core.plan import Plan
from saccade.runtime import worker as worker_module
from saccade.runtime.attention import PagedAttention
from saccade.runtime.graphs import Replay, eager
from saccade.runtime.worker import Worker
from tests.checkpoints import FamilyName
from tests.engine.harness import Harness, set_threads
from tests.families.forwarding import load

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


def test_a_graph_changes_no_answer_and_none_is_captured_for_a_request(
    family: FamilyName, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_threads()
    net, metrics, capture = load(checkpoint(family)), Metrics(), Counting()
    monkeypatch.setattr(worker_module, "eager", capture)
    plain, graphed = (Harness(net, page_size=4, chunk_tokens=16) for _ in range(2))
    graphed.config = Harness(net, page_size=4, chunk_tokens=16, decode_graph_sizes=SIZES).config
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
    over = Harness(net, page_size=4, kv_pages=40, decode_graph_sizes=(4,), prefix_cache=False)
    assert isinstance(over.worker, Worker)
    attention = over.worker._attention
    assert isinstance(attention, PagedAttention)
    for cache in attention._caches.values():
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    answered = answers(over, "c")
    for cache in attention._caches.values():
        written = cache.keys[4:, 0, 0].isfinite().sum()
        assert written == len(PROMPTS["c"]) + 4 - 1, "its own tokens, but the one drawn last"
    assert answered == answers(Harness(net), "c")
