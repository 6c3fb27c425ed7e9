"""The engine's answers are transformers' answers: greedy, float32, token for token, whatever the
chunk size, page size or cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from saccade.core.config import EmbeddingBudgets
from tests.families.answers import CASES, NEW_TOKENS, Model, check
from tests.families.every import EVERY
from tests.fixtures.harness import Harness, Outcome
from tests.fixtures.tiny import picture


@pytest.fixture(scope="module", params=EVERY)
def model(request: pytest.FixtureRequest, answered: Callable[[str], Model]) -> Model:
    return answered(request.param)


@pytest.mark.first
def test_one_at_a_time_and_again_with_everything_cached(model: Model) -> None:
    harness = Harness(model.net)
    for name in CASES:
        check(model, harness.run([model.request(harness, name)]))
    seen = len(harness.encoded)
    assert seen == len(
        {
            key
            for name in CASES
            for key in (image.key for image in model.request(harness, name).images)
        }
    )
    for name in CASES:
        outcomes = harness.run([model.request(harness, name)])
        check(model, outcomes)
        request = model.request(harness, name)
        assert outcomes[name].cached_tokens == (len(request.tokens) - 1) // 16 * 16
    assert len(harness.encoded) == seen, "a seen picture is not encoded again"


@pytest.mark.once("model")
@pytest.mark.parametrize("chunk_tokens", [7, 2048])
def test_a_prefix_that_ends_within_a_picture_is_taken_up_there(
    model: Model, chunk_tokens: int
) -> None:
    """The picture ends the first prompt, so the last whole page ends within it; its other half is
    shown from its embedding.
    """
    case = CASES["one picture"]
    tokens, pixels = model.tokens(case), model.pixels(case)[0]
    harness = Harness(model.net, chunk_tokens=chunk_tokens, page_size=4)
    image = harness.image(pixels, "A")
    begin = tokens.index(model.reference.mark) + 1
    first = harness.request("first", tokens[:begin], [image], max_tokens=1)
    harness.run([first])
    whole = harness.request("whole", tokens, [image], max_tokens=NEW_TOKENS)
    outcome = harness.run([whole])["whole"]
    assert whole.spans[0].start < outcome.cached_tokens < whole.spans[-1].end
    assert outcome.tokens == model.answers["one picture"]
    assert harness.encoded == [image.key]


@pytest.mark.once("model")
@pytest.mark.parametrize("page_size", [1, 16])
def test_an_embedding_is_used_where_the_prefix_cache_is_off(model: Model, page_size: int) -> None:
    harness = Harness(
        model.net, prefix_cache=False, page_size=page_size, kv_pages=4096 // page_size
    )
    for _ in range(2):
        outcomes = harness.run([model.request(harness, "three pictures")])
        check(model, outcomes)
    assert len(harness.encoded) == 3
    assert outcomes["three pictures"].levels == ["embedding"] * 3


@pytest.mark.once("model")
def test_an_embedding_budget_below_one_picture_changes_no_answer(model: Model) -> None:
    harness = Harness(model.net, embeddings=EmbeddingBudgets(1), chunk_tokens=64)
    check(model, harness.run([model.request(harness, name) for name in CASES]))


@pytest.mark.once("model")
def test_another_picture_of_equal_size_gets_its_own_answer(model: Model) -> None:
    """A, then B with the same prompt and size, then A again: B is not answered from A's cache."""
    case = CASES["one picture"]
    tokens = model.tokens(case)
    harness = Harness(model.net, page_size=1)
    first = model.pixels(case)[0]
    second = model.reference.resize(picture(112, 140, seed=77))
    assert first.shape == second.shape

    def ask(pixels: np.ndarray, name: str) -> Outcome:
        image = harness.image(pixels, name)
        return harness.run([harness.request("x", tokens, [image], max_tokens=NEW_TOKENS)])["x"]

    a, b, again = ask(first, "A"), ask(second, "B"), ask(first, "A")
    expanded = harness.request("x", tokens, [harness.image(second, "B")]).tokens
    assert a.tokens == model.answers["one picture"]
    assert (
        b.tokens
        == model.reference.generate(expanded, [second], max_new_tokens=NEW_TOKENS)
        != a.tokens
    )
    assert again.tokens == a.tokens
    assert again.levels == ["kv"]


@pytest.mark.once("model")
def test_sampling_is_reproducible_whatever_else_runs(model: Model) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    harness = Harness(model.net)
    alone = harness.run([model.request(harness, "text", **sampling)])["text"].tokens
    crowded = Harness(model.net, chunk_tokens=16)
    requests = [
        model.request(
            crowded, name, **(sampling if name == "text" else {"temperature": 1.0, "seed": 3})
        )
        for name in CASES
    ]
    assert crowded.run(requests)["text"].tokens == alone
    assert alone != model.answers["text"]
