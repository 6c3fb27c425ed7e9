"""Why less of a prompt was found than might have been: each miss has its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from saccade.core.types import CacheMiss, CacheMissReason, Caching, Request, Span
from saccade.plugins.cache_control.prompt_history import MAX_PROMPTS, PROMPT_BYTES, PromptHistory
from tests.sched.simulator import Simulation
from tests.sched.test_pins import Pinned, shown


def asks(sim: Pinned, request: Request, client: str = "key a") -> Request:
    """The request, which asks why."""
    caching = replace(request.caching, diagnose=True)
    return replace(request, caching=caching, client=client)


def why(sim: Pinned, request: Request, *marks: tuple[int, int]) -> CacheMiss | None:
    return sim.ask(request, *marks, client=request.client).missed


def changed(sim: Pinned) -> Request:
    first = sim.text(1, 30)
    sim.ask(asks(sim, first), client="key a")
    tokens = (*first.tokens[:21], 9, *first.tokens[22:])
    return asks(sim, sim.request(list(tokens), max_tokens=1))


def resized(sim: Pinned) -> Request:
    first = shown(sim, 1, before=5)
    sim.ask(asks(sim, first), client="key a")
    smaller = replace(
        first.images[0], num_tokens=7, key=replace(first.images[0].key, settings=b"s" * 16)
    )
    tokens = [6] * 5 + [39] * 7 + [3] * 9
    return asks(sim, sim.request(tokens, (Span(5, 7, 0),), (smaller,), max_tokens=1))


def evicted(sim: Pinned) -> Request:
    sim.ask(asks(sim, sim.text(1)), client="key a")
    sim.press()
    return asks(sim, sim.text(1))


def expired(sim: Pinned) -> Request:
    sim.ask(asks(sim, sim.text(1)), (20, 300), client="key a")
    sim.clock.now += 300
    sim.press()
    return asks(sim, sim.text(1))


def flushed(sim: Pinned) -> Request:
    sim.ask(asks(sim, sim.text(1)), client="key a")
    sim.flush(embeddings=False)
    return asks(sim, sim.text(1))


def short(sim: Pinned) -> Request:
    return asks(sim, sim.text(1, 4))


MISSES = {
    "prompt_changed": (changed, 21),
    "other_settings": (resized, 5),
    "evicted": (evicted, 0),
    "expired": (expired, 0),
    "flushed": (flushed, 0),
    "too_short": (short, 0),
}


# read_too_slow needs measured rates: plugins/tiers/test_kept_answers.py
@pytest.mark.parametrize("reason", sorted({*get_args(CacheMissReason)} - {"read_too_slow"}))
def test_each_miss_has_its_reason(reason: CacheMissReason) -> None:
    sim = Pinned(prefix_cache=reason != "cache_off", share=0.25)
    if reason == "never_seen":  # another client has sent the same, which is nobody's business
        sim.ask(asks(sim, sim.text(1, 30)), client="key b")
        sim.flush(embeddings=False)
        request, token = asks(sim, sim.text(1, 30)), 0
    elif reason == "cache_off":
        sim.ask(asks(sim, sim.text(1)), client="key a")
        request, token = asks(sim, sim.text(1)), 0
    else:
        make, token = MISSES[reason]
        request = make(sim)
    assert why(sim, request) == CacheMiss(reason, token, len(request.tokens) - token)


def test_nothing_is_missed_where_a_prompt_only_goes_on() -> None:
    sim = Pinned()
    first = asks(sim, sim.text(1, 22))
    assert why(sim, first) == CacheMiss("never_seen", 0, 22)
    longer = asks(sim, sim.request([*first.tokens, *[3] * 20], max_tokens=1))
    assert why(sim, longer) is None and why(sim, replace(longer, id="again")) is None


@pytest.mark.parametrize("first", ["one", ""])
def test_another_salt_of_the_client_is_not_told(first: str) -> None:
    """Who shares a key may separate its own clients by salts."""
    sim = Pinned()
    sim.ask(asks(sim, shown(sim, 1, salt=first)), client="key a")
    for salt in ("two", "" if first else "three"):
        found = why(sim, asks(sim, shown(sim, 1, salt=salt)))
        assert found is not None and found.reason == "never_seen"


def test_prompts_of_one_name_are_compared_however_early_they_differ() -> None:
    sim = Pinned()
    named = Caching(diagnose=True, family="agent")
    for first, reason in ((1, "never_seen"), (8, "prompt_changed")):
        request = replace(sim.text(first), caching=named, client="key a")
        found = why(sim, request)
        assert found is not None and (found.reason, found.token) == (reason, 0)


def test_what_is_remembered_is_bounded_and_a_flood_takes_nothing_from_another() -> None:
    recall = PromptHistory(4, lambda: 0.0)
    sim = Simulation(Pinned().scheduler.limits, 40, 4)
    mine = replace(sim.request([1] * 400), client="mine")
    recall.add_prompt(mine, 0)
    for number in range(3000):
        flood = replace(sim.request([2 + number % 7, number % 39] * 400), client=f"{number % 200}")
        recall.add_prompt(flood, 0)
        assert recall.nbytes <= 32 << 20
    assert recall.nbytes <= 201 * MAX_PROMPTS * (PROMPT_BYTES + 4 * 800)
    again = recall.explain(mine, 0)
    assert again is not None and again.reason == "evicted"
