"""An arena that holds one image or two, and a front that answers in the wrong order: what came too
early makes room for what is needed first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.core.arena import Arena
from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.ipc.messages import (
    Output,
    PixelsReady,
    Stop,
    Submit,
    ToEngine,
    ToFront,
)
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, run_engine, set_threads
from tests.fixtures.tiny import picture


class Front:
    """Decodes what is asked for, of those asked for together the last first; `Stop`s when all
    requests have ended.
    """

    over = False

    def __init__(self, harness: Harness, submits: list[Submit]) -> None:
        self.harness = harness
        self.inbox: list[ToEngine] = [*submits]
        self.running = len(submits)
        self.decodes = 0

    def take_messages(self) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def idle(self) -> None:
        raise AssertionError("the engine waits for what cannot come")

    def send(self, news: ToFront) -> None:
        if not isinstance(news, Output):
            return
        for key, slot in news.want[::-1]:
            self.harness.arena.view(slot)[:] = self.harness.pixels[key]
            self.inbox.append(PixelsReady(key))
            self.decodes += 1
        self.running -= sum(delta.finish is not None for delta in news.deltas)
        if not self.running:
            self.inbox.append(Stop(10.0))


@pytest.mark.parametrize("fitting", [1, 2])
def test_what_came_too_early_makes_room_for_what_is_needed_first(
    checkpoint: Callable[..., Path], fitting: int
) -> None:
    set_threads()
    pixels = [picture(64, 96, seed=seed) for seed in range(12)]
    harness = Harness(
        load(checkpoint("qwen3_vl")),
        arena=Arena.create(fitting * 20480),
        max_running=2,
        chunk_tokens=16,
        prefix_cache=False,
    )
    images = [harness.image(pixels, f"picture {i}") for i, pixels in enumerate(pixels)]
    spec = harness.net.spec
    assert isinstance(spec, QwenVLSpec)
    token = spec.image_token_id
    submits = [
        Submit(
            harness.request(
                f"{i}", [1, token, 2, token, token, 3], images[3 * i : 3 * i + 3], max_tokens=2
            )
        )
        for i in range(4)
    ]
    front = Front(harness, submits)
    run_engine(harness, front)
    assert harness.scheduler.counts.images_encoded == 12 == front.decodes
    assert harness.scheduler.image_scheduler.slots.bytes_in_use == 0
