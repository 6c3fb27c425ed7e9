"""Graphs of the vision tower follow the traffic while nothing runs: the engine says when, every
rank does it in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from saccade.core.arena import Arena
from saccade.core.config import EncoderConfig
from saccade.core.plan import ADAPT, Plan
from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.ipc.messages import Output, PixelsReady, Stop, Submit, ToEngine, ToFront
from saccade.plugins.gpu.cuda.graphs import ENOUGH
from saccade.plugins.gpu.cuda.pack_graphs import PackBuffers
from saccade_bench.lab.qwen import qwen
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, run_engine, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import picture

BUCKETS = (64, 256)
ROWS = 24
"""Patches of the pictures below: a graph for 64 rows computes more than twice as many."""


class Front:
    """The engine's link: sends pixels when they are asked for, one request after another, then
    `Stop`.
    """

    over = False

    def __init__(self, harness: Harness, requests: Sequence[Submit]) -> None:
        self.harness = harness
        self.left = list(requests)
        self.running = 0
        self.inbox: list[ToEngine] = []

    def take_messages(self) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def idle(self) -> None:
        assert not self.running, "the engine waits for what cannot come"
        self.inbox.append(self.left.pop(0) if self.left else Stop(10.0))
        self.running += isinstance(self.inbox[0], Submit)

    def send(self, message: ToFront) -> None:
        if not isinstance(message, Output):
            return
        self.running -= sum(delta.finish is not None for delta in message.deltas)
        for key, slot in message.want:
            self.harness.arena.view(slot)[:] = self.harness.pixels[key]
            self.inbox.append(PixelsReady(key))


def serve(harness: Harness, count: int) -> list[Plan]:
    """`count` requests with a new picture each, one after another, through the engine's loop."""
    spec = harness.net.spec
    assert isinstance(spec, QwenVLSpec)
    factor = qwen(spec).images.factor
    submits = []
    for number in range(count):
        image = harness.image(picture(2 * factor, 3 * factor, seed=number), f"picture {number}")
        assert image.num_patches == ROWS
        tokens = [1, spec.image_token_id, 2]
        submits.append(Submit(harness.request(f"{number}", tokens, [image], max_tokens=1)))
    plans = run_engine(harness, Front(harness, submits))
    assert harness.scheduler.counts.images_encoded == count
    return plans


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes at which the tower ran in a graph's buffers: captures, and replays of them."""
    sizes: list[int] = []
    compute = PackBuffers.compute
    monkeypatch.setattr(
        PackBuffers,
        "compute",
        lambda self, pack: (sizes.append(len(pack.rows)), compute(self, pack))[1],
    )
    return sizes


def test_graphs_are_fitted_to_the_traffic_between_requests(
    checkpoint: Callable[..., Path], captured: list[int]
) -> None:
    set_threads()
    harness = Harness(
        load(checkpoint("qwen3_vl")), encoder=EncoderConfig(graph_sizes=BUCKETS), prefix_cache=False
    )
    plans = serve(harness, ENOUGH + 2)
    assert captured == [256, 64, *[64] * ENOUGH, ROWS, ROWS, ROWS], (
        "two captures, replays, one capture, replays of it"
    )
    adapting = [plan for plan in plans if plan.adapt]
    assert len(adapting) == ENOUGH + 2, "once after each request that encoded something"
    assert all(plan.num_tokens == 0 and plan == Plan(plan.step, change=ADAPT) for plan in adapting)
    running: set[int] = set()
    for plan in plans:
        running -= set(plan.close)
        assert not (plan.adapt and running), "never within a request"
        running |= {opened.slot for opened in plan.open}


@pytest.mark.more
@pytest.mark.parametrize("encoder", ["weights", "data"])
def test_every_rank_fits_its_graphs_in_the_same_step(
    checkpoint: Callable[..., Path], captured: list[int], encoder: str
) -> None:
    set_threads()
    folder = checkpoint("qwen3_vl")
    rank_group = ThreadRankGroup(folder, 2, encoder)  # type: ignore[arg-type]
    harness = Harness(
        rank_group.nets[0],
        rank_group,
        Arena.create(1 << 22),
        encoder=EncoderConfig(graph_sizes=BUCKETS),
        prefix_cache=False,
    )
    serve(harness, ENOUGH + 1)
    if encoder == "weights":
        assert sorted(captured) == sorted([256, 64, *[64] * ENOUGH, ROWS, ROWS] * 2)
    else:
        assert sorted(captured) == sorted([256, 64] * 2 + [64] * ENOUGH + [ROWS, ROWS]), (
            "a rank without pictures keeps its graphs"
        )


def test_without_graphs_nothing_is_fitted(
    checkpoint: Callable[..., Path], captured: list[int]
) -> None:
    set_threads()
    harness = Harness(load(checkpoint("qwen3_vl")))
    plans = serve(harness, 2)
    assert captured == [] and sum(plan.adapt for plan in plans) == 2
