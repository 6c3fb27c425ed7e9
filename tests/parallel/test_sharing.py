"""Who holds what: each rank reads its slices and no more, KV memory follows the heads, pictures are
split evenly, bad sizes are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from saccade.core.config import EncoderMode, Hardware
from saccade.core.errors import ConfigError
from saccade.core.options import EngineOptions, ModelOptions
from saccade.core.settings import ParallelSettings
from saccade.engine.ranks import resolve_parallel
from saccade.engine.sizing import resolve
from saccade.families.registry import family_model, load_spec
from saccade.nn.weights import Part, Weights
from saccade.parallel import UNSHARDED, Shard
from saccade.runtime.vision.vision_encoder import split_evenly
from saccade.runtime.weights.checkpoint_weights import CheckpointWeights
from saccade.runtime.weights.dummy import DummyWeights
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import make_checkpoint

CPU = torch.device("cpu")


class Counting(DummyWeights):
    """Weights that note how much of each tensor was asked for."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights.dtype, weights.device, ops=weights.ops)
        self.weights, self.adapters = weights, weights.adapters
        self.wanted: dict[str, list[torch.Tensor]] = {}

    def load(self, *parts: Part) -> torch.Tensor:
        for part in parts:
            places = torch.arange(math.prod(part.shape)).view(part.shape)[
                part.index or (slice(None),)
            ]
            self.wanted.setdefault(part.name, []).append(places.flatten())
        return self.weights.load(*parts)

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def equals(self, part: Part, values: torch.Tensor) -> bool:
        return self.weights.equals(part, values)

    def fits(self, part: Part) -> bool:
        return self.weights.fits(part)


def read(folder: Path, shard: Shard, encoder_shard: Shard) -> dict[str, torch.Tensor]:
    """Which values of each tensor a rank reads."""
    spec = load_spec(folder)
    model = family_model(spec)
    with CheckpointWeights(folder, model.canonical_name, torch.float32, CPU) as weights:
        counting = Counting(weights)
        model.build(counting, shard, encoder_shard)
    return {name: torch.cat(places) for name, places in counting.wanted.items()}


@pytest.mark.first
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_reads_its_slices_and_all_of_them_make_the_whole(
    family: str, tmp_path: Path, size: int
) -> None:
    folder = make_checkpoint(tmp_path, family, text={"num_key_value_heads": 4})
    shards = [Shard(rank, size) for rank in range(size)]
    reads = [read(folder, shard, shard) for shard in shards]
    with safe_open(folder / "model.safetensors", "pt") as file:
        model = family_model(load_spec(folder))
        sizes = {
            model.canonical_name(name): math.prod(file.get_slice(name).get_shape())
            for name in list(file.keys())
            if not model.harmless(model.canonical_name(name))
        }
    cut = 0
    for name, total in sizes.items():
        places = torch.cat([each[name] for each in reads])
        assert places.unique().shape == (total,), f"{name} is read whole"
        shared = ("norm", "patch_embed", "pos_embed", "ln_q")
        # A router: every rank asks it.
        if name.endswith(("bias", "gate.weight")) or any(each in name for each in shared):
            continue
        assert places.shape == (total,), f"{name} is read once"
        cut += total
    assert cut > 0.8 * sum(sizes.values())


def test_data_mode_reads_the_whole_tower_and_slices_of_the_rest(
    checkpoint: Callable[..., Path],
) -> None:
    wanted = read(checkpoint("qwen3_vl"), Shard(1, 2), UNSHARDED)
    assert wanted["visual.blocks.0.attn.qkv.weight"].shape == (3 * 48 * 48,)
    assert wanted["language_model.layers.0.mlp.down_proj.weight"].shape == (64 * 96 // 2,)


@pytest.mark.parametrize(("kv_heads", "size", "mine"), [(4, 2, 2), (2, 2, 1), (2, 4, 1), (1, 4, 1)])
def test_kv_memory_follows_the_heads_of_a_rank(
    tmp_path: Path, kv_heads: int, size: int, mine: int
) -> None:
    spec = load_spec(make_checkpoint(tmp_path, "qwen3_vl", text={"num_key_value_heads": kv_heads}))
    machine = Hardware("cpu", "", total_bytes=1 << 30, free_bytes=1 << 30)
    shared = resolve(
        ModelOptions(), EngineOptions(mem_fraction_static=0.01), spec, "float32", machine, size
    )
    assert {cache.shape[0] for layer in spec.kv_spec(size).layers for cache in layer} == {mine}
    page_bytes = 3 * 2 * 16 * mine * 16 * 4
    assert shared.kv_pages == int(0.01 * (1 << 30)) // page_bytes


def test_experts_are_divided_where_they_divide(checkpoint: Callable[..., Path]) -> None:
    dense, sparse = load_spec(checkpoint("qwen3_vl")), load_spec(checkpoint("qwen3_vl_moe"))
    with pytest.raises(ConfigError, match="--ep-size 2: the model has no experts to divide"):
        resolve_parallel(ParallelSettings(ep_size=2), dense, "cpu")
    with pytest.raises(ConfigError, match="--ep-size 3: the model has 8 experts, which cannot be"):
        resolve_parallel(ParallelSettings(ep_size=3), sparse, "cpu")
    with pytest.raises(ConfigError, match="--ep-size 3: with --tp-size 2, one must be a multiple"):
        ParallelSettings(2, ep_size=3)
    alone = resolve_parallel(ParallelSettings(ep_size=8), sparse, "cpu")
    assert (alone.ranks, alone.size, alone.encoder) == (8, 1, "data")
    both = resolve_parallel(ParallelSettings(4, ep_size=2), sparse, "cpu")
    assert (both.ranks, both.size, both.expert_runs) == (4, 4, 2)
    # Four attention heads and experts of 40 values: of eight ranks, each has whole experts.
    with pytest.raises(ConfigError, match="--tp-size 8: 4 attention heads cannot"):
        resolve_parallel(ParallelSettings(8, ep_size=8), sparse, "cpu")


def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    checkpoint: Callable[..., Path],
) -> None:
    spec = load_spec(checkpoint("qwen3_vl"))
    for size, what in ((3, "4 attention heads and 2 key/value heads"), (8, "4 attention heads")):
        with pytest.raises(
            ConfigError,
            match=rf"--tp-size {size}: {what} cannot be divided among {size} ranks; .* 1, 2, 4$",
        ):
            resolve_parallel(ParallelSettings(tp_size=size), spec, "cpu")


@pytest.mark.more
def test_the_vision_tower_is_shared_as_its_sizes_allow(tmp_path: Path) -> None:
    def mode(hidden: int, heads: int) -> str:
        vision = {
            "depth": 1,
            "deepstack_visual_indexes": [0],
            "hidden_size": hidden,
            "num_heads": heads,
        }
        spec = load_spec(make_checkpoint(tmp_path / f"{hidden}-{heads}", "qwen3_vl", vision=vision))
        return resolve_parallel(ParallelSettings(2), spec, "cpu").encoder

    assert mode(512, 4) == "weights"
    assert mode(48, 4) == "data", "slices of 24 values are too narrow"
    assert mode(516, 3) == "data", "three heads cannot be divided among two ranks"


def test_a_way_of_adding_up_that_the_device_has_not_is_refused(
    checkpoint: Callable[..., Path],
) -> None:
    spec = load_spec(checkpoint("qwen3_vl"))
    with pytest.raises(
        ConfigError, match="--tune all_reduce=nccl does not work on cpu; use shm or gloo"
    ):
        resolve_parallel(ParallelSettings(2, all_reduce="nccl"), spec, "cpu")
    with pytest.raises(
        ConfigError, match="--tune all_reduce=shm does not work on cuda; use nccl or symm-mem"
    ):
        resolve_parallel(ParallelSettings(2, all_reduce="shm"), spec, "cuda")


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_pictures_are_split_evenly(costs: list[int], parts: int) -> None:
    groups = split_evenly(costs, parts)
    assert sorted(index for group in groups for index in group) == list(range(len(costs)))
    sums = [sum(costs[index] for index in group) for group in groups]
    assert max(sums) - min(sums) <= max(costs, default=0)


@pytest.mark.more
@pytest.mark.parametrize("encoder", get_args(EncoderMode))
def test_sampled_tokens_are_the_same_on_every_rank_and_those_of_one(
    checkpoint: Callable[..., Path], encoder: EncoderMode
) -> None:
    """The rank group itself compares what its ranks drew."""
    set_threads()
    rank_group = ThreadRankGroup(checkpoint("qwen3_vl"), 2, encoder, backend="gloo")
    alone = ThreadRankGroup(checkpoint("qwen3_vl"), 1, encoder)
    answers = []
    for each in (rank_group, alone):
        harness = Harness(alone.nets[0], each)
        image = harness.image(np.full((64, 96, 3), 99, np.uint8), "grey")
        placeholder = alone.nets[0].spec.image_token_id  # type: ignore[attr-defined]
        sampling = {
            "temperature": 1.0,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
            "max_tokens": 16,
            "logprobs": 2,
        }
        requests = [
            harness.request(str(seed), [5, placeholder, 7], [image], seed=seed, **sampling)
            for seed in range(4)
        ]
        answers.append({name: outcome.tokens for name, outcome in harness.run(requests).items()})
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0].values()}) > 1
