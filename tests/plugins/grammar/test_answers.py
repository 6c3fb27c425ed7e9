"""Answers under a grammar from the real scheduler and the real worker, on random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.ipc.messages import Output, Stop, Submit, ToEngine, ToFront, TokenizerText
from saccade.nn.protocol import FamilyNet
from saccade.plugins.grammar.grammar_loader import GrammarLoader
from saccade.plugins.grammar.grammars import Grammars
from saccade.plugins.grammar.matchers import Matchers
from saccade.plugins.grammar.vocabulary import read_lexicon
from saccade.text.grammar.constraint import OutputConstraint
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, run_engine, set_threads
from tests.fixtures.tiny import picture

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


class OrderingFront:
    """Submits a request with a grammar and one without. Notes whose tokens came, in order."""

    over = False

    def __init__(self, messages: list[ToEngine], plain_ended: Event) -> None:
        self.order: list[str] = []
        self._messages = messages
        self._unended = sum(isinstance(message, Submit) for message in messages)
        self._plain_ended = plain_ended

    def take_messages(self) -> list[ToEngine]:
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: ToFront) -> None:
        for delta in message.deltas if isinstance(message, Output) else ():
            self.order += [delta.id] * len(delta.tokens)
            if delta.finish:
                assert delta.error is None, delta.error
                self._unended -= 1
                if delta.id == "plain":
                    self._plain_ended.set()
        if not self._unended:
            self._messages = [Stop(0.0)]
            self._unended = -1

    def idle(self) -> None: ...


def test_answers_go_on_while_the_vocabulary_is_read(
    net: FamilyNet,
    tokenizer: Tokenizer,
    words: tuple[Matchers, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The vocabulary is not read before another request's answer has ended."""
    plain_ended = Event()

    def slow(*arguments: Any) -> Any:
        assert plain_ended.wait(50), "the engine waited for the vocabulary"
        return read_lexicon(*arguments)

    monkeypatch.setattr("saccade.plugins.grammar.vocabulary.read_lexicon", slow)
    harness, spec = Harness(net, kv_pages=512), net.spec
    plain = harness.request("plain", [1, 2, 3], [], max_tokens=40, ignore_eos=True)
    held = harness.request("held", [1, 2, 3], [], max_tokens=120, temperature=1.0, seed=1)
    front = OrderingFront(
        [
            TokenizerText(tokenizer.to_str()),
            Submit(replace(held, grammar=words[1])),
            Submit(plain),
        ],
        plain_ended,
    )
    run_engine(
        harness,
        front,
        grammars=lambda text: GrammarLoader(
            text, spec.vocab_size, spec.eos_token_ids, lambda: None
        ),
    )
    assert front.order[:40] == ["plain"] * 40
    assert {*front.order[40:]} == {"held"}
