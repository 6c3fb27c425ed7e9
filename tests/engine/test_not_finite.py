"""Values that are no numbers, from a damaged weight or embedding, end the requests that meet them,
and no other; nothing of them is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.nn.protocol import FamilyNet
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.tiny import picture

BAD = 77
"""The token whose embedding is damaged."""


@pytest.fixture(scope="module")
def net(checkpoint: Callable[..., Path]) -> FamilyNet:
    set_threads()
    return load(checkpoint("qwen3_vl"))


@pytest.fixture(scope="module")
def stateful(checkpoint: Callable[..., Path]) -> FamilyNet:
    set_threads()
    return load(checkpoint("qwen3_5"))


@contextmanager
def damaged(net: FamilyNet, value: float) -> Iterator[None]:
    """While a number of BAD's embedding is none."""
    text = net.text  # type: ignore[attr-defined]
    embedding = text.embedding

    def broken(tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = embedding(tokens)
        found[tokens == BAD, 3] = value
        return found

    text.embedding = broken
    try:
        yield
    finally:
        text.embedding = embedding


def prompt(length: int, first: int, bad: int | None = None) -> list[int]:
    tokens = [5 + (first + at) % 60 for at in range(length)]
    if bad is not None:
        tokens[bad] = BAD
    return tokens


@pytest.mark.parametrize("kind", ["net", "stateful"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_no_numbers_ends_its_request_and_its_pages_are_not_shared(
    request: pytest.FixtureRequest, kind: str, value: float, temperature: float
) -> None:
    net = request.getfixturevalue(kind)
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": temperature}
    prompts = {
        "early": prompt(100, 0, bad=2),  # in a chunk that draws nothing
        "late": prompt(100, 1, bad=97),
        "sound": prompt(100, 2),
        "short": prompt(9, 3),
        "scored": prompt(100, 4, bad=40),
    }
    scored: dict[str, Any] = {"scored": {"prompt_logprobs": 1}}
    alone, harness = (Harness(net, chunk_tokens=48, prefix_cache=on) for on in (False, True))

    def ask(harness: Harness, *names: str, **more: Any) -> dict[str, list[int]]:
        requests = [
            harness.request(name, prompts[name], (), **asked, **scored.get(name, {}), **more)
            for name in names
        ]
        found = harness.run(requests)
        for name in names:
            if found[name].finish == ["error"]:
                assert "NaN or infinity" in (found[name].error or "")
                assert not found[name].tokens
        return {name: found[name].tokens for name in names if found[name].finish == ["length"]}

    right = ask(alone, *prompts)
    assert sorted(right) == sorted(prompts)
    assert BAD not in right["sound"] + right["short"], "choose another"
    with damaged(net, value):
        beside = ask(harness, *prompts)
        assert beside == {name: right[name] for name in ("short", "sound")}
        assert sorted(ask(harness, "early", "sound")) == ["sound"]
    assert ask(harness, *prompts) == right, "no page of a broken row was found"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_end_every_request_and_not_the_worker(
    net: FamilyNet, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    harness = Harness(net)
    right = harness.run([harness.request("a", prompt(9, 0), max_tokens=4)])["a"].tokens
    kind = type(net.text)  # type: ignore[attr-defined]
    logits = kind.logits

    def broken(self: object, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = logits(self, states)
        found[:, 7] = value
        return found

    asked: dict[str, Any] = {"max_tokens": 4, "logprobs": 2, "frequency_penalty": 0.5}
    with monkeypatch.context() as patch:
        patch.setattr(kind, "logits", broken)
        greedy = harness.request("greedy", prompt(9, 1), (), **asked)
        drawn = harness.request("drawn", prompt(9, 2), (), temperature=1.0, top_p=0.5, **asked)
        found = harness.run([greedy, drawn])
    assert [each.finish for each in found.values()] == [["error"], ["error"]]
    assert harness.run([harness.request("a", prompt(9, 0), max_tokens=4)])["a"].tokens == right


def test_an_embedding_that_is_no_number_ends_the_requests_that_show_it(
    net: FamilyNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(net.spec, QwenVLSpec)
    harness, kind = Harness(net), type(net.vision)
    tokens = [1, net.spec.image_token_id, 2]
    bad, good = (harness.image(picture(64, 96, seed=seed), f"{seed}") for seed in (1, 2))
    split = kind.split

    def broken(self: object, rows: torch.Tensor, *rest: object) -> object:
        return split(self, rows * float("nan"), *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(kind, "split", broken)
        found = harness.run([harness.request("bad", tokens, [bad], max_tokens=4)])
    assert found["bad"].finish == ["error"]
    both = [("bad", bad), ("good", good)]
    found = harness.run(
        [harness.request(name, tokens, [image], max_tokens=4) for name, image in both]
    )
    assert found["good"].finish == ["length"]
