"""What is read of a prompt is what transformers comes to, however the prompt is cut, batched,
preempted or shared among ranks. A request that is read draws nothing, and takes the prefix cache up
to the tokens that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from saccade.core.plan import Plan
from saccade.core.types import PromptReading, Request
from saccade.nn.protocol import FamilyNet
from tests.engine.interrupting import preempt_each_once, run_two_begun
from tests.engine.test_scores import FAMILIES, Subject
from tests.fixtures.harness import Harness, Outcome
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import Reference, picture

TOLERANCE = 2e-4
LABELS = (7, 300, 41)
TWO = "first @ then @ which is blue?", ((64, 96), (90, 120))
PLAIN = "the quick brown fox jumps over the lazy dog; how many red circles are there?", ()
ASKED: dict[str, tuple[tuple[str, tuple[tuple[int, int], ...]], PromptReading | None]] = {
    "state": (TWO, PromptReading()),
    "labels": (TWO, PromptReading(LABELS)),
    "one label": (PLAIN, PromptReading(LABELS[:1])),
    "span": (PLAIN, PromptReading(last=9)),
    "all": (TWO, PromptReading(last=10**6)),
    "answer": (PLAIN, None),
}


def requests_of(subject: Subject, harness: Harness, *names: str) -> list[Request]:
    made = []
    for name, ((text, sizes), reading) in ASKED.items():
        tokens = subject.tokenizer.encode(text.replace("@", subject.reference.placeholder)).ids
        pixels = [subject.reference.resize(picture(*size, seed=size[0])) for size in sizes]
        images = [harness.image(each, f"{size}") for each, size in zip(pixels, sizes)]
        if not names or name in names:
            made.append(harness.request(name, tokens, images, max_tokens=4, reading=reading))
    return made


def check(subject: Subject, harness: Harness, outcomes: Mapping[str, Outcome]) -> None:
    for request in requests_of(subject, harness):
        outcome, reading = outcomes[request.id], request.reading
        assert outcome.error is None
        pixels = [harness.pixels[image.key] for image in request.images]
        if reading is None:
            assert len(outcome.tokens) == 4 and outcome.pooled_outputs == []
            assert outcome.finish == ["length"]
            continue
        assert outcome.finish == ["stop"] and outcome.tokens == []
        tell = subject.reference.logits if reading.labels else subject.reference.states
        expected = tell(request.tokens, pixels)[-reading.last :].numpy()
        expected = expected[:, list(reading.labels)] if reading.labels else expected
        found = np.stack(outcome.pooled_outputs)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.fixture
def subject(checkpoint: Callable[..., Path], reference: Callable[..., Reference]) -> Subject:
    return Subject(checkpoint("qwen3_vl"), reference("qwen3_vl"))


@pytest.mark.first
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_as_transformers(
    name: str, checkpoint: Callable[..., Path], reference: Callable[..., Reference]
) -> None:
    subject = Subject(checkpoint(name), reference(name))
    harness = Harness(subject.net)
    check(subject, harness, harness.run(requests_of(subject, harness)))


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("chunk_tokens", [7, 16])
def test_chunks_leave_readings_alone(
    subject: Subject, chunk_tokens: int, prefix_cache: bool
) -> None:
    harness = Harness(subject.net, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache)
    for _ in range(2):
        check(subject, harness, harness.run(requests_of(subject, harness)))
    assert len(harness.encoded) == 2


def test_preemption_reads_nothing_twice(subject: Subject) -> None:
    harness = Harness(subject.net, chunk_tokens=16, page_size=2, kv_pages=96)
    preempted: set[str] = set()
    interrupt = preempt_each_once(harness, preempted)
    check(subject, harness, harness.run(requests_of(subject, harness), interrupt))
    assert {"state", "labels", "all"} <= preempted


def test_two_plans_in_flight_leave_readings_alone(subject: Subject) -> None:
    harness = Harness(subject.net, chunk_tokens=7)
    check(subject, harness, run_two_begun(harness, requests_of(subject, harness)))


def test_ranks_read_as_one(subject: Subject) -> None:
    harness = Harness(subject.net, ThreadRankGroup(subject.folder, 2, "data"), chunk_tokens=16)
    check(subject, harness, harness.run(requests_of(subject, harness)))


def test_what_is_read_of_the_last_token_takes_the_cached_prefix(subject: Subject) -> None:
    harness = Harness(subject.net)
    for name, tokens_read in (("state", 1), ("labels", 1), ("span", 9), ("all", 10**6)):
        (request,) = requests_of(subject, harness, name)
        harness.run([request])
        again = harness.run([request])[name]
        shared = max(0, len(request.tokens) - tokens_read)
        assert again.cached_tokens == shared // 16 * 16
    assert len(harness.encoded) == 2


def test_readings_share_steps_and_nothing_is_drawn_for_them(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    whole = type(subject.net).logits

    def counted(net: FamilyNet, states: object) -> object:
        rows.append(len(states))  # type: ignore[arg-type]
        return whole(net, states)  # type: ignore[arg-type]

    harness = Harness(subject.net)
    monkeypatch.setattr(type(subject.net), "logits", counted)
    plans: list[Plan] = []
    read = requests_of(subject, harness, "labels", "one label", "span")
    harness.run(read[1:], plans.append)
    assert len([plan for plan in plans if plan.rows]) == 1
    assert not any(row.sample for plan in plans for row in plan.rows) and rows == [1]


def test_a_prompt_that_is_read_may_fill_the_context(subject: Subject) -> None:
    (asked,) = requests_of(subject, Harness(subject.net), "one label")
    length = len(asked.tokens)
    harness = Harness(subject.net, context_length=length)
    assert harness.run([asked])["one label"].finish == ["stop"]
    (answered,) = requests_of(subject, harness, "answer")
    assert "of which one is for the answer" in (harness.run([answered])["answer"].error or "")
    harness = Harness(subject.net, context_length=length - 1)
    assert f"allows {length - 1}: shorten" in (harness.run([asked])["one label"].error or "")
