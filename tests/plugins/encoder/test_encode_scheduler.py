"""A server that only encodes: one encoding for all who ask, embeddings in shared memory within
their half of it, and nothing left in it once they have been sent.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from saccade.cache.embeddings import EmbeddingCache
from saccade.core.config import EmbeddingBudgets
from saccade.core.plan import Plan, StepResult
from saccade.core.types import Delta, Image, ImageKey, Request, SamplingParams, Span
from saccade.plugins.encoder.encode_scheduler import EncodeScheduler
from saccade.sched.limits import SchedulerLimits
from tests.sched.simulator import picture

ROW = 4096
"""Bytes of a token's embedding: a page of the arena."""


def scheduler(pages: int = 64, device: int = 1 << 20) -> EncodeScheduler:
    """Half of `pages` for pixels, half for embeddings."""
    limits = SchedulerLimits(8, 512, 1000, 10_000, arena_bytes=pages * 4096)
    return EncodeScheduler(limits, EmbeddingCache(EmbeddingBudgets(device), ROW))


def request(id: str, image: Image, client: str = "") -> Request:
    count = image.num_tokens
    tokens, spans = (0,) * count, (Span(0, count, 0),)
    return Request(id, tokens, spans, (image,), SamplingParams(max_tokens=1), client=client)


def step(decider: EncodeScheduler) -> tuple[Plan, list[Delta]]:
    """Plan, and carry out what was planned."""
    plan = decider.plan()
    return plan, [] if plan.empty else carry_out(decider, plan)


def carry_out(decider: EncodeScheduler, plan: Plan) -> list[Delta]:
    encoded = tuple((encode.key, 1.0, 0.0) for encode in plan.encode)
    return decider.apply(StepResult(plan.step, encoded=encoded))


def ready(decider: EncodeScheduler) -> list[ImageKey]:
    """The front end brings all that is wanted."""
    wanted = [key for key, _ in decider.take_notices().want]
    for key in wanted:
        decider.pixels_ready(key)
    return wanted


def test_all_who_ask_for_an_image_share_one_encoding_and_each_gets_a_copy() -> None:
    decider, image = scheduler(), picture(1, 8)
    for id in ("a", "b"):
        assert decider.add_request(request(id, image)) == []
    assert ready(decider) == [image.key]
    assert [encode.key for encode in step(decider)[0].encode] == [image.key]
    assert decider.add_request(request("late", image)) == []
    plan, deltas = step(decider)
    assert [(each.key, each.num_tokens) for each in plan.deliver] == [(image.key, 8)] * 3
    places = [delta.embedding for delta in deltas]
    assert len(set(places)) == 3 and {place[1] for place in places if place} == {8 * ROW}
    half = 32 * 4096
    assert all(place is not None and place[0] >= half for place in places)
    levels = [delta.images[0].level for delta in deltas]
    assert levels.count("none") == 1 and levels.count("embedding") == 2
    assert decider.counts.images_encoded == 1 and decider.idle


def test_embeddings_wait_for_room_until_others_have_been_sent() -> None:
    decider = scheduler(pages=16)  # eight pages for embeddings
    for number in range(3):
        decider.add_request(request(str(number), picture(number, 4)))  # four pages each
    deltas: list[Delta] = []
    for _ in range(8):
        ready(decider)
        deltas += step(decider)[1]
    assert [delta.finish for delta in deltas] == ["stop", "stop"]
    assert step(decider)[0].empty
    assert decider.abort(deltas[0].id) == [], "it has been sent"
    assert [delta.embedding for delta in step(decider)[1]] == [deltas[0].embedding]


def test_an_image_that_is_too_large_or_told_of_in_two_ways_is_refused() -> None:
    decider, image = scheduler(pages=8), picture(1, 4)
    assert [delta.code for delta in decider.add_request(request("large", picture(2, 17)))] == [
        "too_large"
    ]
    decider.add_request(request("a", image))
    lie = replace(image, num_tokens=3)
    assert [delta.code for delta in decider.add_request(request("lie", lie))] == ["wrong_settings"]
    ready(decider)
    step(decider), step(decider)
    assert [delta.code for delta in decider.add_request(request("lie", lie))] == ["wrong_settings"]


@pytest.mark.more
def test_whoever_leaves_and_whatever_fails_leaves_nothing_behind() -> None:
    """Requests come, leave at any moment, and fail; in the end the whole arena is free."""
    for seed in range(40):
        rng = random.Random(seed)
        decider = scheduler(pages=16, device=rng.choice([0, 1 << 15, 1 << 20]))
        wanted: list[ImageKey] = []
        alive: set[str] = set()
        flights: list[Plan] = []
        for number in range(120):
            if rng.random() < 0.5:
                id = str(number)
                assert not decider.add_request(request(id, picture(rng.randrange(6), 4), id[-1]))
                alive.add(id)
            wanted += [key for key, _ in decider.take_notices().want]
            if wanted and rng.random() < 0.7:
                key = wanted.pop(rng.randrange(len(wanted)))
                if rng.random() < 0.1:
                    decider.pixels_failed(key, "no")
                else:
                    decider.pixels_ready(key)
            if alive and rng.random() < 0.3:
                decider.abort(alive.pop())
            if len(flights) < 2 and rng.random() < 0.8 and not (plan := decider.plan()).empty:
                flights.append(plan)
            if flights and rng.random() < 0.6:
                carry_out(decider, flights.pop(0))
            decider.audit()
        for plan in flights:
            carry_out(decider, plan)
        for _ in range(60):  # those that are left end by themselves, once what was told is sent
            wanted += [key for key, _ in decider.take_notices().want]
            while wanted:
                decider.pixels_ready(wanted.pop())
            for delta in step(decider)[1]:
                decider.abort(delta.id)
            for id in alive:
                if id in decider.unsent:
                    decider.abort(id)
        assert decider.idle and not decider.unsent
        decider.audit()
