"""Whatever tier an embedding comes from, the answers are transformers', and no image is encoded
again that any tier holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from saccade.core.config import EmbeddingBudgets
from saccade.core.store import SUFFIX, file_name
from saccade.core.types import Image
from saccade.engine.memory_estimate import embedding_bytes_per_token
from saccade.nn.protocol import FamilyNet
from saccade_bench.lab.qwen import qwen
from tests.families.answers import CASES, Model, check
from tests.families.every import OFTEN
from tests.fixtures.harness import Harness
from tests.helpers.breadth import combinations

PICTURES = 9
"""Different ones in CASES."""
ROUNDS = 8


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OFTEN if name != "qwen3_vl"]
"""Tiers know nothing of families: the one whose embeddings have most parts stands for all."""


@pytest.fixture(scope="module", params=["qwen3_vl", *SLOW])
def model(request: pytest.FixtureRequest, answered: Callable[[str], Model]) -> Model:
    return answered(request.param)


def one_picture(net: FamilyNet, model: Model) -> int:
    """Bytes of the largest embedding of CASES."""
    harness = Harness(net)
    tokens = [image.num_tokens for name in CASES for image in model.request(harness, name).images]
    return max(tokens) * embedding_bytes_per_token(net.spec, "float32")


@pytest.mark.more
@pytest.mark.parametrize(
    ("tiers", "chunk_tokens", "prefix_cache"),
    combinations(
        ("host", "disk", "host and disk"),
        (16, 2048),
        (True, False),
        default=[
            ("host", 2048, True),
            ("disk", 2048, False),
            ("host and disk", 16, False),
        ],
    ),
)
def test_every_tier_gives_the_same_answers(
    model: Model, tmp_path: Path, tiers: str, chunk_tokens: int, prefix_cache: bool
) -> None:
    one = one_picture(model.net, model)
    disk = EmbeddingBudgets(one, one if "host" in tiers else 0, 1 << 30, str(tmp_path))
    budgets = disk if "disk" in tiers else EmbeddingBudgets(one, one)
    harness = Harness(
        model.net, embeddings=budgets, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache
    )
    for _ in range(2):
        check(model, harness.run([model.request(harness, name) for name in CASES]))
    for name in CASES:
        check(model, harness.run([model.request(harness, name)]))
    embeddings = harness.scheduler.embeddings
    if "disk" in tiers:
        assert (
            len(harness.encoded)
            == len(set(harness.encoded))
            == len(embeddings.tiers["disk"])
            == PICTURES
        )
    if not prefix_cache:
        assert all(embeddings.hits[tier] > 0 for tier in embeddings.tiers)
    assert embeddings.device.evictions > 0
    harness.close()


@pytest.mark.more
def test_a_restart_answers_from_disk_without_encoding(model: Model, tmp_path: Path) -> None:
    budgets = EmbeddingBudgets(64 << 20, 0, 1 << 30, str(tmp_path))
    first = Harness(model.net, embeddings=budgets)
    check(model, first.run([model.request(first, name) for name in CASES]))
    assert len(first.encoded) == PICTURES
    first.close()
    again = Harness(model.net, embeddings=budgets)
    outcomes = again.run([model.request(again, name) for name in CASES])
    check(model, outcomes)
    assert again.encoded == [] and again.decoded == [], "not even pixels were asked for"
    found = {
        (level, tier)
        for outcome in outcomes.values()
        for level, tier in zip(outcome.levels, outcome.tiers)
    }
    assert ("embedding", "disk") in found and found <= {
        ("embedding", "disk"),
        ("embedding", "device"),
        ("kv", None),
    }
    again.close()


@pytest.mark.more
@pytest.mark.parametrize("how", ["a value", "a folder instead"])
def test_files_damaged_between_two_runs_cost_encoding_and_nothing_else(
    model: Model, tmp_path: Path, how: str
) -> None:
    budgets = EmbeddingBudgets(64 << 20, 0, 1 << 30, str(tmp_path))
    first = Harness(model.net, embeddings=budgets)
    first.run([model.request(first, name) for name in CASES])
    first.close()
    again = Harness(model.net, embeddings=budgets)
    for file in tmp_path.glob("*/*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.unlink()
        if how == "a value":
            file.write_bytes(data)
        else:
            file.mkdir()
    check(model, again.run([model.request(again, name) for name in CASES]))
    assert len(again.encoded) == PICTURES
    again.close()
    third = Harness(model.net, embeddings=budgets)
    check(model, third.run([model.request(third, name) for name in CASES]))
    assert len(third.encoded) == (0 if how == "a value" else PICTURES), (
        "what was encoded again was saved again where it could be"
    )
    third.close()


CHUNKS = (1, 7, 16, 64, 2048)


@pytest.mark.first
@pytest.mark.parametrize(
    ("chunk_tokens", "prefix_cache"),
    combinations(
        CHUNKS,
        (True, False),
        default=[(1, True), (16, True), (2048, True), (7, False)],
    ),
)
def test_a_chat_of_eight_rounds_encodes_each_picture_once(
    model: Model, chunk_tokens: int, prefix_cache: bool
) -> None:
    harness = Harness(model.net, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache)
    rng = np.random.default_rng(0)
    factor = qwen(model.net.spec).images.factor
    history: list[int] = []
    images: list[Image] = []
    for number in range(ROUNDS):
        pixels = rng.integers(0, 256, (factor * (2 + number % 3), factor * 3, 3), np.uint8)
        images.append(harness.image(pixels, f"round {number}"))
        history += model.tokenizer.encode(
            f"user {model.reference.placeholder} how many? assistant "
        ).ids
        outcome = harness.run([harness.request(f"{number}", history, images, max_tokens=4)])[
            f"{number}"
        ]
        assert outcome.finish == ["length"] and len(outcome.levels) == number + 1
        history += outcome.tokens
    assert Counter(harness.encoded) == {image.key: 1 for image in images}


def test_what_another_server_has_encoded_is_read(model: Model, tmp_path: Path) -> None:
    """And what a third has removed meanwhile, or cut short, is encoded."""
    budgets = EmbeddingBudgets(64 << 20, 0, 1 << 30, str(tmp_path), shared=True)
    one, other = (Harness(model.net, embeddings=budgets) for _ in range(2))
    check(model, one.run([model.request(one, name) for name in CASES]))
    one.close()
    requests = [model.request(other, name) for name in CASES]
    files = {path.name: path for path in tmp_path.glob("*/*" + SUFFIX)}
    assert len(files) == PICTURES
    images = {image.key: image for request in requests for image in request.images}
    for image in images.values():
        other.scheduler.embeddings.seen_in_store(image, file_name(image.key) in files)
    gone, torn, *_ = files.values()
    gone.unlink()
    torn.write_bytes(torn.read_bytes()[:-1])
    check(model, other.run(requests))
    lost = {key for key in images if file_name(key) in (gone.name, torn.name)}
    assert set(other.encoded) == lost and len(other.encoded) == 2
    other.close()
    assert gone.exists() and torn.exists(), "they were saved again"
