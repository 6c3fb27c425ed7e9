"""Rules of tokens on the real scheduler and worker: the answers are transformers' with the same
rules, side by side, in chunks, and preempted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from saccade.core.token_rules import NO_RULES, NoRepeat, ThinkingBudget, TokenRules
from saccade.core.types import Request
from saccade.families.registry import load_spec
from saccade.front.answer_defaults import load_answer_defaults
from saccade.nn.protocol import FamilyNet
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.harness import Harness, Outcome, set_threads
from tests.fixtures.tiny import Reference, make_checkpoint, reference

TEXT = "red red red red blue red red; a green star is a green star"
LENGTH = 24
ASKED: Mapping[str, tuple[TokenRules, dict[str, Any]]] = {
    "free": (NO_RULES, {}),
    "pairs": (TokenRules(no_repeat=NoRepeat(2)), {"no_repeat_ngram_size": 2}),
    "triples": (TokenRules(no_repeat=NoRepeat(3)), {"no_repeat_ngram_size": 3}),
    "none twice": (TokenRules(no_repeat=NoRepeat(1)), {"no_repeat_ngram_size": 1}),
}


class Model:
    """A checkpoint in both worlds."""

    def __init__(self, folder: Path) -> None:
        set_threads()
        make_checkpoint(folder, "qwen3_vl")
        spec = load_spec(folder)
        self.net: FamilyNet = load_net(
            spec, folder, dtype=torch.float32, device=torch.device("cpu")
        )
        self.reference: Reference = reference(folder)
        self.tokens: list[int] = (
            Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
        )
        generation = self.reference.model.generation_config
        generation.eos_token_id, generation.pad_token_id = None, 0

    @torch.inference_mode()
    def generate(self, **rules: Any) -> list[int]:
        """transformers' greedy answer."""
        self.reference.model.model.rope_deltas = None
        inputs = self.reference.inputs(self.tokens)
        output = self.reference.model.generate(
            **inputs, max_new_tokens=LENGTH, do_sample=False, **rules
        )
        answer: list[int] = output[0, len(self.tokens) :].tolist()
        return answer

    def request(self, harness: Harness, name: str, rules: TokenRules, **more: Any) -> Request:
        request = harness.request(name, self.tokens, max_tokens=LENGTH, **more)
        return replace(request, rules=rules)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("restraint"))


def tokens(outcome: Outcome) -> list[int]:
    assert outcome.error is None and outcome.finish == ["length"]
    return outcome.tokens


@pytest.mark.first
@pytest.mark.parametrize("pages", [512, 22], ids=["roomy", "preempted"])
def test_answers_without_repetition_are_those_of_transformers(model: Model, pages: int) -> None:
    harness = Harness(model.net, page_size=4, kv_pages=pages, chunk_tokens=9)
    asked = {
        name: (model.generate(**theirs), model.request(harness, name, rules))
        for name, (rules, theirs) in ASKED.items()
    }
    assert len({tuple(answer) for answer, _ in asked.values()}) == len(ASKED), "each rule matters"
    outcomes = harness.run([request for _, request in asked.values()])
    for name, (answer, _) in asked.items():
        assert tokens(outcomes[name]) == answer, name
    assert (harness.scheduler.counts.preemptions > 0) == (pages == 22)


def test_bad_words_are_never_in_the_answer_and_change_nothing_before(model: Model) -> None:
    harness = Harness(model.net)
    free = tokens(harness.run([model.request(harness, "free", NO_RULES)])["free"])
    word = tuple(free[4:7])
    rules = TokenRules(bad_words=(word,))
    found = tokens(harness.run([model.request(harness, "word", rules)])["word"])
    assert found[:6] == free[:6] and found[6] != free[6]
    assert all(tuple(found[at : at + 3]) != word for at in range(LENGTH))
    theirs = model.generate(bad_words_ids=[list(word)])
    assert found == theirs, "the prompt has no beginning of the word at its end"


def test_only_allowed_tokens_come_also_where_they_are_drawn(model: Model) -> None:
    harness = Harness(model.net)
    rules = TokenRules(allowed=(5, 11, 40))
    for seed in range(3):
        request = model.request(harness, f"{seed}", rules, temperature=1.0, seed=seed)
        assert set(tokens(harness.run([request])[f"{seed}"])) <= {5, 11, 40}


def test_reasoning_ends_in_time(model: Model) -> None:
    harness = Harness(model.net)
    free = tokens(harness.run([model.request(harness, "free", NO_RULES)])["free"])
    close = next(token for token in range(300, 400) if token not in free)
    rules = TokenRules(thinking=ThinkingBudget(6, close - 1, close, True))
    found = tokens(harness.run([model.request(harness, "thinks", rules)])["thinks"])
    assert found[:6] == free[:6] and found[6] == close and found.count(close) == 1


@pytest.mark.parametrize("field", ["suppress_tokens", "bad_words_ids", "no_repeat_ngram_size"])
def test_a_checkpoints_rules_are_those_of_transformers(
    model: Model, field: str, tmp_path: Path
) -> None:
    harness = Harness(model.net)
    free = tokens(harness.run([model.request(harness, "free", NO_RULES)])["free"])
    begun = [model.tokens[-1], free[0]]  # begins in the prompt
    value = {
        "suppress_tokens": sorted(set(free[:5])),
        "bad_words_ids": [begun, free[4:6], [free[8]]],
        "no_repeat_ngram_size": 2,
    }[field]
    theirs = model.generate(**{field: value})
    assert theirs != free
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    rules = load_answer_defaults(tmp_path, model.net.spec).rules
    assert tokens(harness.run([model.request(harness, field, rules)])[field]) == theirs
