"""Keys and values kept in 8 bits: near to what full precision answers, and the same answers cold,
warm, in chunks, preempted, and on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.core.config import KVConfig, StepGraphSizes
from saccade.core.errors import CheckpointError
from saccade.core.types import Request
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.weights.kv_scales import read_kv_scales
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import picture

EIGHT = KVConfig("fp8_e4m3")
NAMES = ("text", "more", "image", "short")
FAMILIES = ("qwen2_vl", "qwen3_vl")  # with biases, with normalised keys


@pytest.fixture(scope="module", params=FAMILIES)
def net(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> FamilyNet:
    set_threads()
    folder = checkpoint(request.param)
    return load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"))


def requests(over: Harness, **sampling: Any) -> list[Request]:
    """Text, an image, both with a shared beginning."""
    spec: Any = over.net.spec
    factor = spec.images.factor
    shown = over.image(np.ascontiguousarray(picture(3 * factor, 4 * factor, seed=5)), "shown")
    text = [int(each) for each in np.random.default_rng(3).integers(5, 60, 41)]
    asked = {"text": text, "more": [*text, 7, 8, 9], "short": text[:2]}
    found = [over.request(n, t, max_tokens=20, **sampling) for n, t in asked.items()]
    tokens = [*text[:2], spec.image_token_id, *text[2:9]]
    return [*found, over.request("image", tokens, [shown], max_tokens=20, **sampling)]


def answers(over: Harness) -> list[list[int]]:
    outcomes = over.run(requests(over))
    assert all(outcome.error is None for outcome in outcomes.values())
    return [outcomes[name].tokens for name in NAMES]


def scores(net: FamilyNet, kv: KVConfig) -> np.ndarray:
    """Log-probabilities of the prompts' tokens."""
    over = Harness(net, kv=kv)
    outcomes = over.run(requests(over, prompt_logprobs=0))
    found = [each[1][0] for name in NAMES for each in outcomes[name].scores]
    return np.array(found)


def test_eight_bits_are_near_full_precision(net: FamilyNet) -> None:
    whole = scores(net, KVConfig())
    layers = net.spec.kv_spec().kv_layers
    for kv in (EIGHT, KVConfig("fp8_e4m3", ((0.5, 0.25),) * layers)):
        off = np.abs(scores(net, kv) - whole)
        assert 0.01 < off.mean() < 0.2, "keys and values are rounded, and no more than that"


def test_scales_out_of_reach_are_felt(net: FamilyNet) -> None:
    """With values 1e-6 times theirs, all are the largest number that 8 bits hold."""
    layers = net.spec.kv_spec().kv_layers
    wrong = scores(net, KVConfig("fp8_e4m3", ((1.0, 1e-6),) * layers))
    assert np.abs(wrong - scores(net, KVConfig())).mean() > 1


@pytest.mark.parametrize(
    ("changes", "preempts"),
    [
        ({"chunk_tokens": 7}, False),
        ({"page_size": 1, "chunk_tokens": 16}, False),
        ({"page_size": 2, "chunk_tokens": 16, "kv_pages": 40, "prefix_cache": False}, True),
    ],
    ids=["chunks", "pages of one token", "preempted"],
)
def test_answers_do_not_depend_on_how_they_come_about(
    net: FamilyNet, changes: dict[str, Any], preempts: bool
) -> None:
    over = Harness(net, kv=EIGHT)
    cold = answers(over)
    assert answers(over) == cold, "warm"
    other = Harness(net, kv=EIGHT, context_length=128, **changes)
    assert answers(other) == cold
    assert bool(other.scheduler.counts.preemptions) == preempts


def test_graphs_of_decoding_answer_the_same(net: FamilyNet) -> None:
    over = Harness(net, kv=EIGHT, graphs=StepGraphSizes((1, 4)))
    assert answers(over) == answers(Harness(net, kv=EIGHT))


@pytest.mark.first
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one(checkpoint: Callable[..., Path], family: str) -> None:
    rank_group = ThreadRankGroup(checkpoint(family), 2, "data")
    one = Harness(rank_group_net(checkpoint(family)), kv=EIGHT)
    assert answers(Harness(one.net, rank_group, kv=EIGHT)) == answers(one)


def rank_group_net(folder: Path) -> FamilyNet:
    return load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"))


def test_scales_of_a_checkpoint_are_read_or_named(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    whole = load_file(checkpoint("qwen3_vl") / "model.safetensors")
    layers = load_spec(checkpoint("qwen3_vl")).kv_spec().kv_layers
    name = "model.language_model.layers.{}.self_attn.{}_scale"
    kept = {
        name.format(at, which): torch.tensor([value + at])
        for at in range(layers)
        for which, value in (("k", 0.5), ("v", 0.25))
    }

    def read(change: dict[str, torch.Tensor]) -> tuple[tuple[float, float], ...]:
        save_file({**whole, **kept, **change}, tmp_path / "model.safetensors")
        return read_kv_scales(tmp_path, layers)

    assert read({}) == tuple((0.5 + at, 0.25 + at) for at in range(layers))
    assert read_kv_scales(checkpoint("qwen3_vl"), layers) == ()
    first = name.format(0, "k")
    for wrong, said in (
        (torch.ones(4), rf"tensor {first} is torch.float32 \[4\], but each layer must have"),
        (torch.zeros(1), f"tensor {first} is 0.0: a scale must be above 0"),
        (torch.tensor([torch.nan]), f"tensor {first} is nan"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read({first: wrong})
    del kept[first]
    with pytest.raises(CheckpointError, match="the checkpoint is incomplete"):
        read({})
