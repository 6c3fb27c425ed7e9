"""A device that has no memory left, and a tower that raises, end the request that needs them, not
the server: what raises is PyTorch's own error, in the real worker, and what comes after it is as
ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.nn.protocol import FamilyNet
from tests.families.forwarding import load
from tests.fixtures.harness import Harness
from tests.fixtures.tiny import picture

PROMPT = (5, 6, 7)


@pytest.fixture
def net(checkpoint: Callable[..., Path]) -> FamilyNet:
    return load(checkpoint("qwen3_vl"))


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.69 GiB")


def full_once(
    call: Callable[..., Any], when: Callable[..., bool], error: Exception = FULL
) -> Callable[..., Any]:
    """`call`, which raises the first time that `when` holds for what it is given."""
    left = [True]

    def instead(*arguments: Any, **named: Any) -> Any:
        if left and when(*arguments):
            left.clear()
            raise error
        return call(*arguments, **named)

    return instead


def shown(harness: Harness, name: str, id: str, size: int = 64) -> Any:
    image = harness.image(picture(size, size, seed=len(id)), name)
    token = harness.net.spec.image_token_id  # type: ignore[attr-defined]
    return harness.request(id, [*PROMPT, token, 8], [image], max_tokens=4)


FAILURES = {
    "no memory": (FULL, "out of device memory while encoding an image", None),
    "a bug": (
        TypeError("'NoneType' object is not iterable"),
        "failed on an image of this request: TypeError: 'NoneType' object is not iterable",
        "internal_error",
    ),
    "no words": (AssertionError(), "of this request: AssertionError", "internal_error"),
    "torch": (
        RuntimeError("The size of tensor a (3) must match"),
        "RuntimeError: The size of tensor a (3) must match",
        "internal_error",
    ),
    "a full host": (MemoryError(), "out of device memory while encoding an image", None),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("blocks", [0, 2], ids=["as it begins", "between parts"])
def test_an_image_that_is_not_encoded_ends_its_requests_alone(
    net: FamilyNet, monkeypatch: pytest.MonkeyPatch, blocks: int, failure: str
) -> None:
    error, words, code = FAILURES[failure]
    harness = Harness(net, tower_budget=100)
    text = harness.request("text", PROMPT, max_tokens=30)
    wanted = Harness(net).run([text])["text"].tokens
    layers = net.vision.layers  # type: ignore[attr-defined]
    layers_now = list(layers)
    layers_now[blocks] = full_once(layers[blocks], lambda *_: True, error)
    monkeypatch.setattr(net.vision, "layers", layers_now)
    found = harness.run([text, shown(harness, "a", "one"), shown(harness, "a", "two!")])
    assert found["text"].tokens == wanted and found["text"].error is None
    for name in ("one", "two!"):
        assert words in (found[name].error or "") and found[name].code == code
    harness.scheduler.audit()
    again = harness.run([shown(harness, "a", "one")])["one"]
    assert again.error is None and len(again.tokens) == 4, "the next time it is encoded"
    assert len(harness.worker.images.embeddings) == 1  # type: ignore[attr-defined]


def test_an_image_that_a_tower_does_not_take_spares_those_beside_it(
    net: FamilyNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of one pack are encoded apart where the pack raises."""
    sizes = {"1": 64, "2": 96, "3": 128}

    def ask(harness: Harness) -> Mapping[str, Any]:
        return harness.run([shown(harness, id, id, size) for id, size in sizes.items()])

    wanted = ask(Harness(net))
    embed, begun = type(net.vision).embed, list[int]()

    def refuse(vision: Any, pixels: torch.Tensor, facts: Any) -> torch.Tensor:
        begun.append(len(pixels))
        if len(pixels) == sizes["2"]:
            raise ValueError("it is not taken")
        return embed(vision, pixels, facts)

    monkeypatch.setattr(type(net.vision), "embed", refuse)
    harness = Harness(net)
    found = ask(harness)
    assert begun == [64, 96, 64, 96, 128], "the first time together"
    assert "it is not taken" in (found["2"].error or "")
    assert [found[id].tokens for id in "13"] == [wanted[id].tokens for id in "13"]
    harness.scheduler.audit()


def test_a_step_that_finds_no_memory_ends_its_requests_and_leaves_their_pages(
    net: FamilyNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(net)
    first = harness.request("first", range(5, 25), max_tokens=5)
    wanted = Harness(net).run([first])["first"].tokens
    few = full_once(type(net).forward, lambda _net, batch, *_: len(batch.tokens) > 30)
    monkeypatch.setattr(type(net), "forward", few)
    large = harness.request("large", range(5, 60), max_tokens=5)
    found = harness.run([large, shown(harness, "a", "one")])
    assert "out of device memory in a step" in (found["large"].error or "")
    after = harness.run([first])
    assert after["first"].tokens == wanted
    again = harness.run([large])["large"]
    assert again.error is None and len(again.tokens) == 5
    harness.scheduler.audit()
