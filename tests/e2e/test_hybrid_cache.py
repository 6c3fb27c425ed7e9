"""Hybrid models keep their prefix cache: the counts that docs/serve/hybrid.md claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from saccade_bench.agents.run import AgentTask
from saccade_bench.fixtures.server import Server, serving
from saccade_bench.workloads.conversations import WorkloadSize, groups
from saccade_bench.workloads.replay import PeerServer, WorkloadRound, replay

pytestmark = pytest.mark.more

PAGE = 16
WORDS = 20
SIZE = WorkloadSize(1, 6, (3,), (224, 128), WORDS, 8)


@pytest.fixture(scope="module")
def hybrid(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A tiny Qwen3.5: most of its layers keep a state."""
    options = ("--dtype", "float32", "--served-model-name", "tiny")
    with serving(checkpoint("qwen3_5"), tmp_path_factory.mktemp("hybrid"), *options) as server:
        yield server


def rounds(server: Server, workload: str) -> list[WorkloadRound]:
    (group,) = groups(workload, SIZE)
    task = AgentTask(max_tokens=SIZE.max_tokens, salt=workload)
    return replay(PeerServer("this", server.url, "tiny"), group, SIZE.users, 7, task, 0)


def computed(found: WorkloadRound) -> float:
    assert found.computed is not None
    return found.computed


def test_a_growing_chat_computes_what_is_new(hybrid: Server) -> None:
    """In each round an image and its text, and at most two pages beside them."""
    found = rounds(hybrid, "growing-chat")
    for before, after in pairwise(found):
        assert computed(after) <= after.prompt - before.prompt + 2 * PAGE
    assert computed(found[-1]) <= 0.25 * found[-1].prompt, "three quarters hit in the sixth round"
    assert [each.encoded for each in found] == [1] * len(found)


def test_the_same_request_again_computes_at_most_a_page(hybrid: Server) -> None:
    first, again = rounds(hybrid, "identical")
    assert computed(again) <= PAGE < computed(first)
    assert (first.encoded, again.encoded) == (3, 0)


def test_the_same_images_under_another_text_compute_the_text(hybrid: Server) -> None:
    first, again = rounds(hybrid, "same-images")
    images = hybrid_images(first)
    assert computed(again) <= again.prompt - images + PAGE
    assert again.encoded == 0


def test_images_behind_seen_ones_are_all_that_is_computed(hybrid: Server) -> None:
    first, more = rounds(hybrid, "half-seen")
    assert computed(more) <= more.prompt - hybrid_images(first) + PAGE
    assert (first.encoded, more.encoded) == (3, 3)


def hybrid_images(found: WorkloadRound) -> int:
    """Return the tokens of a request's three images: 4 x 7 each, and two marks."""
    assert found.new + found.seen == 3
    return 3 * (4 * 7 + 2)
