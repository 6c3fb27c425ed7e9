"""The scores of prompts are those of transformers, however the prompt is cut, batched, preempted or
shared among ranks; they come once, in order, and take nothing from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from saccade.core.types import Request
from saccade.nn.protocol import FamilyNet
from saccade.plugins.scores import worker as scores
from tests.engine.interrupting import preempt_each_once, run_two_begun
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, Outcome, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import Reference, picture
from tests.helpers.breadth import broad

TOLERANCE = 2e-4
TOP = 3
QUICK = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = broad((*QUICK, "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4"), keep=QUICK)
PROMPTS = {
    "text": ("the quick brown fox jumps over the lazy dog; how many", ()),
    "two pictures": ("first @ then @ which is blue?", ((64, 96), (90, 120))),
    "another": ("There are two blue squares and one green star. the quick brown fox", ()),
}


class Subject:
    """One checkpoint in both worlds."""

    def __init__(self, folder: Path, reference: Reference) -> None:
        set_threads()
        self.folder = folder
        self.net: FamilyNet = load(folder)
        self.reference = reference
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def requests(self, harness: Harness, **sampling: object) -> list[Request]:
        """All prompts; the first two are scored."""
        made = []
        for name, (text, sizes) in PROMPTS.items():
            tokens = self.tokenizer.encode(text.replace("@", self.reference.placeholder)).ids
            pixels = [self.reference.resize(picture(*size, seed=size[0])) for size in sizes]
            images = [harness.image(each, f"{size}") for each, size in zip(pixels, sizes)]
            top = None if name == "another" else TOP
            wanted = {"max_tokens": 4, "prompt_logprobs": top, **sampling}
            made.append(harness.request(name, tokens, images, **wanted))
        return made

    def expected(self, request: Request, harness: Harness) -> torch.Tensor:
        """Log-probabilities [P - 1, V] of what follows each token of the prompt but the last."""
        pixels = [harness.pixels[image.key] for image in request.images]
        logits = self.reference.logits(request.tokens, pixels)
        return torch.log_softmax(logits, dim=-1)[:-1]

    def check(self, harness: Harness, outcomes: Mapping[str, Outcome]) -> None:
        for request in self.requests(harness):
            outcome = outcomes[request.id]
            assert outcome.error is None and len(outcome.tokens) == 4
            if request.id == "another":
                assert outcome.scores == []
                continue
            assert len(outcome.scores) == len(request.tokens) - 1
            assert outcome.cached_tokens == 0
            rows = self.expected(request, harness)
            for row, token, (ids, found, rank) in zip(rows, request.tokens[1:], outcome.scores):
                assert ids[0] == token and len(ids) == len(found) == 1 + TOP
                assert found == pytest.approx(row[ids].tolist(), abs=TOLERANCE)
                assert found[1:] == pytest.approx(row.topk(TOP).values.tolist(), abs=TOLERANCE)
                near = TOLERANCE
                assert int((row > row[token] + near).sum()) < rank
                assert rank <= 1 + int((row > row[token] - near).sum())


@pytest.fixture
def subject(checkpoint: Callable[..., Path], reference: Callable[..., Reference]) -> Subject:
    return Subject(checkpoint("qwen3_vl"), reference("qwen3_vl"))


@pytest.mark.first
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_scores_as_transformers(
    name: str, checkpoint: Callable[..., Path], reference: Callable[..., Reference]
) -> None:
    subject = Subject(checkpoint(name), reference(name))
    harness = Harness(subject.net)
    subject.check(harness, harness.run(subject.requests(harness)))


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("chunk_tokens", [7, 16])
def test_chunks_leave_scores_alone(subject: Subject, chunk_tokens: int, prefix_cache: bool) -> None:
    harness = Harness(subject.net, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache)
    for _ in range(2):
        subject.check(harness, harness.run(subject.requests(harness)))


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preemption_sends_no_score_twice(subject: Subject, prefix_cache: bool) -> None:
    longest = max(len(each.tokens) for each in subject.requests(Harness(subject.net)))
    harness = Harness(
        subject.net,
        chunk_tokens=16,
        page_size=2,
        kv_pages=longest // 2 + 12,
        prefix_cache=prefix_cache,
    )
    requests = subject.requests(harness)
    preempted: set[str] = set()
    interrupt = preempt_each_once(harness, preempted)
    subject.check(harness, harness.run(requests, interrupt))
    assert preempted == set(PROMPTS)


def test_two_plans_in_flight_leave_scores_alone(subject: Subject) -> None:
    harness = Harness(subject.net, chunk_tokens=7)
    subject.check(harness, run_two_begun(harness, subject.requests(harness)))


def test_ranks_score_as_one(subject: Subject) -> None:
    rank_group = ThreadRankGroup(subject.folder, 2, "data")
    harness = Harness(subject.net, rank_group, chunk_tokens=16)
    subject.check(harness, harness.run(subject.requests(harness)))


def test_a_scored_prompt_takes_no_prefix_and_gives_its_own(subject: Subject) -> None:
    harness = Harness(subject.net)
    picture = subject.requests(harness)[1]
    plain = subject.requests(harness, prompt_logprobs=None)[1]
    harness.run([plain])
    scored = harness.run([picture])[picture.id]
    assert scored.cached_tokens == 0 and len(scored.scores) == len(picture.tokens) - 1
    assert scored.levels == ["embedding"] * 2 and len(harness.encoded) == 2
    harness = Harness(subject.net)
    harness.run(subject.requests(harness)[1:2])
    again = harness.run(subject.requests(harness, prompt_logprobs=None)[1:2])[plain.id]
    assert again.cached_tokens == (len(plain.tokens) - 1) // 16 * 16


def test_the_head_sees_a_block_at_a_time_and_only_what_was_asked(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    whole = type(subject.net).logits

    def counted(net: FamilyNet, states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return whole(net, states)

    monkeypatch.setattr(type(subject.net), "logits", counted)
    monkeypatch.setattr(scores, "SCORE_BLOCK_BYTES", 5 * 4 * subject.net.spec.vocab_size)
    harness = Harness(subject.net)
    requests = subject.requests(harness)
    subject.check(harness, harness.run(requests))
    prompt = sum(len(request.tokens) - 1 for request in requests[:2])
    drawn = sum(request.sampling.max_tokens for request in requests)
    assert max(sizes) == 5 and sum(sizes) == prompt + drawn
    sizes.clear()
    harness.run(subject.requests(harness, prompt_logprobs=None))
    assert sum(sizes) == drawn
