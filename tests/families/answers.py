"""What an engine is asked with any model, and what transformers answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from saccade.core.types import Request
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.harness import Harness, Outcome, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import Reference, picture, reference

NEW_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """A prompt with one mark per picture, and the pictures' sizes before resizing."""

    prompt: str
    pictures: tuple[tuple[int, int], ...] = ()


CASES: Mapping[str, Case] = {
    "text": Case("the quick brown fox jumps over the lazy dog; how many"),
    "one picture": Case("look: @ how many red circles are there?", ((112, 140),)),
    "three pictures": Case(
        "first @ then @ and at last @ which is blue?", ((64, 96), (150, 70), (90, 200))
    ),
    "resized up": Case("a small one @ lazy dog", ((20, 31),)),
    "resized down": Case("a large one @ quick brown", ((700, 500),)),
    "three turns": Case(
        "user\n@ how many?\nassistant\nThere are two blue squares.\nuser\n@ and "
        "here?\nassistant\none green star.\nuser\nred?",
        ((80, 80), (64, 128)),
    ),
    "another text": Case("There are two blue squares and one green star. "),
    "the same picture twice": Case("@ over @ over", ((96, 64), (96, 64))),
}


ASKED = ("text", "one picture", "three pictures", "three turns", "the same picture twice")
"""Cases for several ranks."""


@dataclass(frozen=True)
class Model:
    """One checkpoint in both worlds, with the reference's answer to every case."""

    net: FamilyNet
    tokenizer: Tokenizer
    reference: Reference
    answers: Mapping[str, Sequence[int]]

    def pixels(self, case: Case) -> list[np.ndarray]:
        # Equal sizes are equal pictures: the seed is the size.
        return [
            self.reference.resize(picture(height, width, seed=height * 1000 + width))
            for height, width in case.pictures
        ]

    def tokens(self, case: Case) -> list[int]:
        prompt = case.prompt.replace("@", self.reference.placeholder)
        ids: list[int] = self.tokenizer.encode(prompt).ids
        return ids

    def request(self, harness: Harness, name: str, **sampling: object) -> Request:
        case = CASES[name]
        images = [
            harness.image(pixels, f"{size}")
            for size, pixels in zip(case.pictures, self.pixels(case))
        ]
        return harness.request(name, self.tokens(case), images, max_tokens=NEW_TOKENS, **sampling)


def load(folder: Path, names: Collection[str] = tuple(CASES)) -> Model:
    """Load a checkpoint in both worlds, with the answers to the cases of those names."""
    set_threads()
    net = load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bare = Model(net, tokenizer, reference(folder), {})
    return replace(bare, answers={name: reference_answer(bare, CASES[name]) for name in names})


def reference_answer(model: Model, case: Case) -> list[int]:
    """transformers' `generate`, made to go on after an end token as the engine is."""
    pixels = model.pixels(case)
    harness = Harness(model.net)
    images = [harness.image(each, str(index)) for index, each in enumerate(pixels)]
    expanded, _ = model.net.spec.expand_prompt(model.tokens(case), images)
    model.reference.go_on()
    return model.reference.generate(expanded, pixels, max_new_tokens=NEW_TOKENS)


def check(model: Model, outcomes: Mapping[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        assert outcome.error is None
        assert outcome.finish == ["length"]
        assert outcome.tokens == model.answers[name.split("#")[0]], name


def check_rank_group(model: Model, rank_group: ThreadRankGroup) -> None:
    """Cold, warm, and all at once."""
    harness = Harness(model.net, rank_group, chunk_tokens=64)
    check(model, harness.run([model.request(harness, name) for name in ASKED]))
    encoded = len(harness.encoded)
    for name in ASKED:
        check(model, harness.run([model.request(harness, name)]))
    assert len(harness.encoded) == encoded, "a seen picture is not encoded again"
