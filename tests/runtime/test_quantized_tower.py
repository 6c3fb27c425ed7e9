"""A vision tower in 8 bits: near a whole one, and never taken for it by any cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.core.config import EmbeddingBudgets, EncoderConfig, ParallelConfig, TowerQuantization
from saccade.core.errors import ConfigError
from saccade.core.metrics import Metrics
from saccade.engine.process import identify
from saccade.families.registry import load_spec
from saccade.ipc.messages import Load
from saccade.nn.protocol import FamilyNet
from saccade.plugins.models.gemma4.embedder import ImageEmbedder
from saccade.runtime.vision.fingerprint import fingerprint_encoder
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.weights.checkpoint_weights import check_tower, load_net, load_tower
from saccade.runtime.weights.quant_policy import LoadTally, QuantPolicy
from saccade_bench.lab.qwen import qwen
from tests.families.every import SEEING
from tests.fixtures.harness import CONFIG, Harness
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.processor import needs_int8

CPU = torch.device("cpu")


def load(folder: Path, mode: TowerQuantization) -> tuple[FamilyNet, LoadTally]:
    tally = LoadTally()
    net = load_net(
        load_spec(folder),
        folder,
        dtype=torch.float32,
        device=CPU,
        quantization_tower=mode,
        tally=tally,
    )
    return net, tally


def embedding(net: FamilyNet) -> torch.Tensor:
    """Of the family's sample image."""
    spec = net.spec
    known = PositionCache(spec, net.vision, Metrics())
    encoder = PackedEncoder(net, known, EncoderConfig(), torch.empty(0))
    pixels = torch.from_numpy(np.asarray(picture(*spec.sample.canvas)))
    return encoder.encode_plainly(pixels, spec.sample.grid)


@pytest.mark.first
@needs_int8
@pytest.mark.parametrize("family", SEEING)
def test_a_tower_in_8_bits_sees_nearly_the_same(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family)
    (whole, nothing), (few, tally) = load(folder, "none"), load(folder, "int8")
    assert nothing.tower.count == 0 and not tally.kinds, "the language model stays as it was"
    least = 1 if isinstance(few.vision, ImageEmbedder) else 4 * few.vision.depth
    assert tally.tower.count == tally.tower.made >= least
    assert tally.tower.nbytes < tally.tower.dense / 2
    assert "matrices of the vision encoder in int8, made at load" in tally.line(torch.float32)
    one, other = embedding(whole), embedding(few)
    assert not torch.equal(one, other)
    assert (one - other).norm() / one.norm() < 0.05


@needs_int8
def test_an_encoder_alone_has_the_same_tower(tmp_path: Path) -> None:
    folder, tally = make_checkpoint(tmp_path, "qwen3_vl"), LoadTally()
    load_tower(
        load_spec(folder),
        folder,
        dtype=torch.float32,
        device=CPU,
        quantization_tower="int8",
        tally=tally,
    )
    assert tally.tower.count == load(folder, "int8")[1].tower.count


@needs_int8
def test_no_cache_takes_one_tower_for_the_other(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_vl")
    for shared in (False, True):
        store = tmp_path / f"store{shared}"
        store.mkdir()
        budgets = EmbeddingBudgets(64 << 20, 0, 1 << 30, str(store), shared=shared)
        kept: dict[TowerQuantization, set[str]] = {}
        for mode in ("none", "int8"):
            net, _ = load(folder, mode)
            told = EncoderConfig(quantization=mode)
            harness = Harness(net, embeddings=budgets, encoder=told)
            image = harness.image(picture(64, 96), "a")
            tokens = [1, 2, qwen(net.spec).image_token_id, 3]
            harness.run([harness.request("r", tokens, [image], max_tokens=2)])
            assert harness.encoded == [image.key], f"encoded by the tower {mode} itself"
            harness.close()
            kept[mode] = {path.parent.name for path in store.glob("*/*.safetensors")}
        assert len(kept["int8"]) == 2, "each tower's files lie in a folder of their own"


def test_a_tower_that_answers_alike_in_8_bits_is_another_one_all_the_same(tmp_path: Path) -> None:
    """Its answers differ somewhere else than on the one image that is tried."""
    spec = load_spec(make_checkpoint(tmp_path, "qwen3_vl"))
    rows = torch.ones(spec.num_tokens(spec.sample.grid), spec.embedding_width)
    whole = fingerprint_encoder(spec, CPU, lambda *_: rows)
    assert whole == fingerprint_encoder(spec, CPU, lambda *_: rows, "none")
    assert whole != fingerprint_encoder(spec, CPU, lambda *_: rows, "int8")


def test_kv_pages_of_one_tower_are_not_the_others(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_vl")
    parallel = ParallelConfig(1, "weights", "shm", 60.0)
    order = Load(str(folder), "cpu", "float32", "auto", 1, parallel)
    names = {
        identify(CONFIG, each, load_spec(folder), "weights").digest()
        for each in (order, replace(order, quantization_tower="int8"))
    }
    assert len(names) == 2


@needs_int8
def test_a_model_without_a_tower_of_ours_refuses_the_option(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_vl")
    net, tally = load(folder, "none")
    policy = QuantPolicy(lambda _: True, made="int8", native=True, tally=tally, tower=True)
    with pytest.raises(ConfigError, match="--quantization-tower int8: this model has no vision"):
        check_tower(policy, net)


def test_a_device_without_products_in_8_bits_refuses_the_option(tmp_path: Path) -> None:
    spec = load_spec(folder := make_checkpoint(tmp_path, "qwen3_vl"))
    with pytest.raises(ConfigError, match=r"--quantization-tower int8: it needs --device cpu"):
        load_net(
            spec,
            folder,
            dtype=torch.float32,
            device=torch.device("meta"),
            quantization_tower="int8",
        )
