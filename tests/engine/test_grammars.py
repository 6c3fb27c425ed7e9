"""Answers under a grammar from the real scheduler and the real worker, on random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from saccade.core.grammar_vocab import read_lexicon
from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.nn.protocol import FamilyNet
from saccade.sched.grammar_state import Matchers
from saccade.text.grammar.grammars import Grammars, OutputConstraint
from saccade_bench.fixtures.harness import Harness, set_threads
from saccade_bench.fixtures.tiny import picture
from tests.families.forwarding import load

SCHEMA = {
    "type": "object",
    "properties": {
        "first_colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
    },
    "required": ["first_colour", "sizes", "next"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def net(checkpoint: Callable[..., Path]) -> FamilyNet:
    set_threads()
    return load(checkpoint("qwen3_vl"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint("qwen3_vl") / "tokenizer.json"))


@pytest.fixture(scope="module")
def words(net: FamilyNet, tokenizer: Tokenizer) -> tuple[Matchers, str]:
    """Matchers, and the grammar of SCHEMA."""
    spec = net.spec
    lexicon = read_lexicon(tokenizer.to_str(), spec.vocab_size, spec.eos_token_ids)
    matchers = Matchers(lexicon, spec.vocab_size, spec.eos_token_ids)
    return matchers, Grammars(lexicon, spec.vocab_size).compile(
        OutputConstraint("json", SCHEMA, "x")
    ).text


def run(
    net: FamilyNet, words: tuple[Matchers, str], count: int = 4, pages: int = 512, **sampling: Any
) -> tuple[Harness, list[list[int]]]:
    """Answers to prompts with a picture each, side by side with as many without a grammar."""
    harness = Harness(net, kv_pages=pages)
    harness.matchers, grammar = words
    assert isinstance(net.spec, QwenVLSpec)
    requests = []
    for index in range(count):
        image = harness.image(picture(64, 96, seed=index), f"picture {index}")
        tokens = [1, net.spec.image_token_id, 2, index]
        asked = {"temperature": 1.0, "seed": index, "max_tokens": 120, **sampling}
        plain = harness.request(f"p{index}", tokens, [image], **asked | {"max_tokens": 12})
        shaped = harness.request(f"g{index}", tokens, [image], **asked)
        requests += [plain, replace(shaped, grammar=grammar)]
    outcomes = harness.run(requests)
    assert all(outcomes[f"g{index}"].finish == ["stop"] for index in range(count))
    return harness, [outcomes[f"{kind}{i}"].tokens for kind in "gp" for i in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_computed_together_goes_on_as_what_is_drawn_one_by_one(
    net: FamilyNet, tokenizer: Tokenizer, words: tuple[Matchers, str], temperature: float
) -> None:
    jumped, together = run(net, words, temperature=temperature)
    stepped, one_by_one = run(net, words, temperature=temperature, logprobs=0)
    assert together == one_by_one
    assert jumped.steps < 0.75 * stepped.steps
    ends = set(net.spec.eos_token_ids)
    for tokens in together[:4]:
        text = tokenizer.decode([token for token in tokens if token not in ends])
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_preempted_answer_goes_on_after_its_forced_tokens(
    net: FamilyNet, words: tuple[Matchers, str]
) -> None:
    calm, expected = run(net, words, 6)
    tight, found = run(net, words, 6, pages=8)
    assert calm.scheduler.counts.preemptions == 0 < tight.scheduler.counts.preemptions
    assert found == expected


def test_an_end_that_is_banned_is_drawn_where_nothing_else_may_be(
    net: FamilyNet, words: tuple[Matchers, str]
) -> None:
    _, tokens = run(net, words, 2, min_tokens=100)
    assert all(len(each) < 100 for each in tokens[:2])
