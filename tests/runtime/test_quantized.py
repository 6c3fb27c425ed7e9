"""Quantised checkpoints answer as their unquantised twins, on one rank and on two; what is wrong
with their scales is named; matrices made int8 at load.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.core.config import QuantizationMode
from saccade.core.errors import CheckpointError, ConfigError
from saccade.families.registry import load_spec
from saccade.kernels import device
from saccade.kernels.matrix import MAX_UNQUANTIZED_ROWS, DenseMatrix, Fp8Matrix, Int8Matrix
from saccade.kernels.reference import linear
from saccade.nn.decoder import Decoder
from saccade.nn.family_model import FullNet
from saccade.nn.mlp import GatedMLP
from saccade.nn.protocol import FamilyNet
from saccade.parallel import Shard
from saccade.plugins.cpu import quantized_ops
from saccade.plugins.cpu.vnni_layout import Int4Panels
from saccade.plugins.models.internvl.spec import InternVLSpec
from saccade.runtime.weights import checkpoint_weights as weights
from saccade.runtime.weights import quant_policy
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.weights.quant_policy import LoadTally
from saccade_bench.lab.qwen import qwen
from tests.families.forwarding import CPU, Session
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.breadth import broad
from tests.helpers.processor import needs_int8, needs_vnni
from tests.quantising import FORMATS, SCALES_BY_ROWS, is_projection, quantise

F8 = torch.float8_e4m3fn
UP = "model.language_model.layers.1.mlp.up_proj."

Pair = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """(quantised, twin) by format."""
    set_threads()
    whole = make_checkpoint(tmp_path_factory.mktemp("whole"), "qwen3_vl")
    return cache(lambda name: quantise(whole, FORMATS[name], tmp_path_factory.mktemp("pair")))


@pytest.fixture
def spoiled(pair: Pair, tmp_path: Path) -> Path:
    """A copy of a checkpoint in blocks of FP8."""
    return Path(shutil.copytree(pair("fp8 blocks")[0], tmp_path / "model"))


def load(
    folder: Path, mode: QuantizationMode, dtype: torch.dtype = torch.float32
) -> tuple[FamilyNet, str]:
    tally = LoadTally()
    net = load_net(
        load_spec(folder),
        folder,
        dtype=dtype,
        device=CPU,
        quantization=mode,
        tally=tally,
    )
    return net, tally.line(dtype)


def placeholder(net: FamilyNet) -> int:
    if isinstance(net.spec, InternVLSpec):
        return net.spec.placeholder.marks[0]
    return qwen(net.spec).image_token_id


def answers(net: FamilyNet, rank_group: ThreadRankGroup | None = None) -> list[list[int]]:
    """Greedy tokens about a picture, and about text."""
    harness = Harness(net, rank_group)
    image = harness.image(picture(64, 96), "a")
    pad = placeholder(net)
    asked = [
        harness.request("picture", [1, 2, pad, 3, 4], [image], max_tokens=24),
        harness.request("text", [5, 6, 7, 8, 9], max_tokens=24),
    ]
    outcomes = harness.run(asked)
    return [outcomes[request.id].tokens for request in asked]


def logits(net: FamilyNet) -> torch.Tensor:
    pad = placeholder(net)
    pixels = [np.asarray(picture(*net.spec.sample.canvas))]
    return Session(net, [1, 2, pad, 3], pixels, page_size=None).prefill()


def projections(net: FamilyNet) -> list[object]:
    assert isinstance(net, FullNet) and isinstance(net.text, Decoder)
    found: list[object] = []
    for layer in net.text.layers:
        assert isinstance(layer.mlp, GatedMLP)
        found += [layer.mixer.qkv.weight, layer.mixer.out.weight]
        found += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
    return found


@pytest.mark.first
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_quantised_checkpoint_answers_as_its_twin(
    pair: Pair, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, twin = pair(name)
    with caplog.at_level(logging.WARNING):
        net, line = load(quantised, "none")
    assert not caplog.records, "scales belong to their matrices"
    whole, silence = load(twin, "none")
    assert torch.equal(logits(net), logits(whole))
    assert answers(net) == answers(whole)
    assert line.startswith("20 quantized matrices of the checkpoint converted to float32 at load: ")
    assert silence == ""


@pytest.mark.more
@pytest.mark.parametrize("name", broad(FORMATS, keep=["fp8 blocks", "fp8 channels"]))
def test_two_ranks_answer_as_the_twin(pair: Pair, name: str) -> None:
    quantised, twin = pair(name)
    whole, _ = load(twin, "none")
    rank_group = ThreadRankGroup(quantised, 2, "data", quantization="none")
    assert answers(whole, rank_group) == answers(whole)


@pytest.mark.more
@needs_int8
def test_int8_runs_as_stored_and_as_its_twin_made_int8(pair: Pair) -> None:
    quantised, twin = pair("w8a8 int8")
    net, line = load(quantised, "auto")
    kinds = [isinstance(matrix, Int8Matrix) for matrix in projections(net)]
    assert kinds.count(False) == 1, "of the product with a matrix that is not quantised"
    assert "11 matrices of the language model in int8, as the checkpoint has them" in line
    made, line = load(twin, "int8")
    assert all(isinstance(matrix, Int8Matrix) for matrix in projections(made))
    assert "13 matrices of the language model in int8, made at load" in line
    near = torch.nn.functional.cosine_similarity(logits(net), logits(made))
    assert near.min() > 0.99
    assert len(answers(net, ThreadRankGroup(quantised, 2, "data"))[0]) == 24


@needs_int8
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl"])
def test_int8_made_at_load_is_near_the_checkpoint(
    checkpoint: Callable[..., Path], family: str
) -> None:
    folder = checkpoint(family)
    whole, _ = load(folder, "auto")
    net, line = load(folder, "int8")
    assert isinstance(net, FullNet) and isinstance(net.text, Decoder)
    near = torch.nn.functional.cosine_similarity(logits(net), logits(whole))
    assert near.min() > 0.98
    assert isinstance(net.text.head.weight, Int8Matrix)
    assert "13 matrices" in line and "made at load" in line
    assert "lost 0.4 % of its perplexity so" in line, "who asks for few bits is told what they cost"


@needs_vnni
def test_int4_made_at_load_is_near_the_checkpoint_and_its_head_has_eight_bits(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint("qwen3_vl")
    net, line = load(folder, "int4")
    assert isinstance(net, FullNet) and isinstance(net.text, Decoder)
    assert all(isinstance(matrix, Int4Panels) for matrix in projections(net))
    assert isinstance(net.text.head.weight, Int8Matrix)
    assert "12 matrices of the language model in int4, made at load" in line
    assert line.startswith("1 matrices of the language model in int8")
    assert "lost about 27 % of its perplexity so" in line
    near = torch.nn.functional.cosine_similarity(logits(net), logits(load(folder, "auto")[0]))
    assert near.min() > 0.9


def test_int4_without_llvm_is_refused_with_what_to_install(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant_policy, "runs_int8", lambda: True)
    monkeypatch.setattr(quantized_ops, "has_vnni", lambda: False)
    with pytest.raises(
        ConfigError, match=r"--quantization int4: .*scripts/install\.py .*'\.\[cpu\]'"
    ):
        load(checkpoint("qwen3_vl"), "int4")


@pytest.mark.first
@needs_int8
@pytest.mark.parametrize("mode", ["int8", pytest.param("int4", marks=needs_vnni)])
def test_quantised_tokens_do_not_depend_on_the_batch(
    checkpoint: Callable[..., Path], mode: QuantizationMode
) -> None:
    net, _ = load(checkpoint("qwen3_vl"), mode)
    prompts = [[i, i + 1, i + 2] for i in range(1, 8)]
    together = Harness(net)
    asked = [together.request(str(p), p, max_tokens=12) for p in prompts]
    outcomes = together.run(asked)
    for prompt in prompts:
        alone = Harness(net)
        request = alone.request(str(prompt), prompt, max_tokens=12)
        assert alone.run([request])[request.id].tokens == outcomes[str(prompt)].tokens


@needs_int8
def test_dummy_weights_may_be_int8(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3_vl")
    net = load_net(
        load_spec(folder),
        folder,
        dtype=torch.bfloat16,
        device=CPU,
        load_format="dummy",
        quantization="int8",
    )
    assert all(isinstance(matrix, Int8Matrix) for matrix in projections(net))


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    broad(["fp8 blocks of products", "fp8 channels", "fp8 tensor"], ["fp8 blocks of products"]),
)
def test_fp8_stays_where_the_device_has_it(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for such a GPU: its products are PyTorch's, of the same numbers."""
    quantised, twin = pair(name)
    whole, _ = load(twin, "none")
    monkeypatch.setattr(weights, "has_fp8", lambda _: True)
    net, line = load(quantised, "auto")
    kinds = [isinstance(matrix, Fp8Matrix) for matrix in projections(net)]
    assert kinds.count(False) == 1, "of the product with a matrix that is not quantised"
    assert "11 matrices of the language model in fp8, as the checkpoint has them" in line
    torch.testing.assert_close(logits(net), logits(whole), atol=2e-4, rtol=2e-4)
    assert answers(net) == answers(whole)
    assert answers(net, ThreadRankGroup(quantised, 2, "data")) == answers(whole)
    restored, line = load(quantised, "none")
    assert not any(isinstance(matrix, Fp8Matrix) for matrix in projections(restored))


@pytest.mark.parametrize("name", ["fp8 blocks of products", "fp8 channels"])
def test_slices_in_fp8_are_padded_with_what_adds_nothing(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To whole units of 64, as on a GPU: the checkpoint's 96 inner values are none."""
    quantised, twin = pair(name)
    whole, _ = load(twin, "none")
    monkeypatch.setattr(weights, "has_fp8", lambda _: True)
    monkeypatch.setattr(linear, "PADDED", ("cpu",))
    net: Any = load(quantised, "auto")[0]
    for layer in net.text.layers:
        up, down = layer.mlp.gate_up.weight, layer.mlp.down.weight
        assert isinstance(up, Fp8Matrix) and isinstance(down, Fp8Matrix)
        assert up.values.shape[0] == 2 * 128 and down.values.shape[1] == 128
        assert len(up.scales) == 2 * 128 and down.group in (32, 128)
    torch.testing.assert_close(logits(net), logits(whole), atol=2e-4, rtol=2e-4)


WIDE = {"text": {"hidden_size": 256, "intermediate_size": 256}, "vision": {"out_hidden_size": 256}}
"""Sizes of a checkpoint with blocks of 128 in it."""


@pytest.mark.first
@SCALES_BY_ROWS
@pytest.mark.parametrize("name", ["fp8 blocks of 128", "fp8 channels"])
def test_many_rows_in_fp8_are_near_their_twin(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for a GPU that multiplies 8 bits. Few rows are not made such."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {"text": WIDE["text"] | heads, "vision": WIDE["vision"]}
    folder = make_checkpoint(tmp_path / "whole", "qwen3_vl", **sizes)  # type: ignore[arg-type]
    quantised, twin = quantise(folder, FORMATS[name], tmp_path)
    whole, _ = load(twin, "none")
    monkeypatch.setattr(weights, "has_fp8", lambda _: True)
    monkeypatch.setattr(device, "multiplies_fp8", lambda *_: True)
    monkeypatch.setattr(device, "multiplies_blocks", lambda _: True)
    net: Any = load(quantised, "auto")[0]
    for at, layer in enumerate(net.text.layers):
        assert layer.mlp.gate_up.group == layer.mlp.down.group == net_group(name)
        assert layer.mixer.out.group == 128
        # Of the second layer's keys the checkpoint has 32 bits.
        assert layer.mixer.qkv.group == (0 if at == 1 else net_group(name))
    tokens = [int(each) for each in np.random.default_rng(0).integers(5, 60, 40)]
    found, expected = (prefill(each, tokens, 40) for each in (net, whole))
    off = (found - expected).norm() / expected.norm()
    assert 1e-3 < off < 0.12, "three bits of mantissa, in twelve products"
    few, same = (prefill(each, tokens, MAX_UNQUANTIZED_ROWS) for each in (net, whole))
    torch.testing.assert_close(few, same, atol=2e-4, rtol=2e-4)


def net_group(name: str) -> int:
    return 128 if name == "fp8 blocks of 128" else 256


def prefill(net: FamilyNet, tokens: list[int], chunk: int) -> torch.Tensor:
    return Session(net, tokens, [], page_size=4).prefill(chunk)


def test_blocks_that_no_product_can_be_made_of_are_made_whole(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, twin = pair("fp8 blocks")  # 24 inputs share a scale
    monkeypatch.setattr(weights, "has_fp8", lambda _: True)
    net, line = load(quantised, "auto")
    assert not any(isinstance(matrix, Fp8Matrix) for matrix in projections(net))
    assert "20 quantized matrices of the checkpoint converted to float32 at load" in line
    assert torch.equal(logits(net), logits(load(twin, "none")[0]))


def test_damaged_fp8_is_named(spoiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = spoiled / "model.safetensors"
    config = json.loads((spoiled / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [16, 64]
    (spoiled / "config.json").write_text(json.dumps(config))
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    for key, value in tensors.items():
        if key.endswith("weight_scale_inv"):
            weight = tensors[key.removesuffix("_scale_inv")]
            tensors[key] = value[:, : -(-weight.shape[1] // 64)].contiguous()
    tensors[UP + "weight"] = (tensors[UP + "weight"].float() * torch.nan).to(F8)
    save_file(tensors, file)
    monkeypatch.setattr(weights, "has_fp8", lambda _: True)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has values that are not finite"):
        load(spoiled, "auto")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_cuts_scales_as_it_cuts_weights(pair: Pair, rank: int) -> None:
    quantised, twin = pair("fp8 blocks")  # 16 by 24: no cut is at the edge of a block
    shard = Shard(rank, 2)
    nets = [
        load_net(load_spec(folder), folder, dtype=torch.float32, device=CPU, shard=shard)
        for folder in (quantised, twin)
    ]
    for mine, whole in zip(*map(projections, nets)):
        assert isinstance(mine, DenseMatrix) and isinstance(whole, DenseMatrix)
        assert torch.equal(mine.values.to_dense(), whole.values.to_dense())


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_matrices_are_made_so_on_a_cpu_only(
    checkpoint: Callable[..., Path], mode: QuantizationMode
) -> None:
    folder = checkpoint("qwen3_vl")
    with pytest.raises(ConfigError, match=rf"--quantization {mode}: it needs --device cpu"):
        load_net(
            load_spec(folder),
            folder,
            dtype=torch.float32,
            device=torch.device("meta"),
            quantization=mode,
        )


SCALE = UP + "weight_scale_inv"


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "change", "wrong"),
    [
        (
            UP + "weight",
            None,
            r"no file has the tensor .*up_proj\.weight, which config\.json requires",
        ),
        (SCALE, None, r"no file has the tensor .*up_proj\.weight_scale_inv, the scales of"),
        (SCALE, lambda t: t[:-1], rf"tensor {SCALE} is \[5, 3\], but .* \[6, 3\]"),
        (SCALE, lambda t: t.t(), rf"tensor {SCALE} is \[3, 6\], but .* \[6, 3\]"),
        (SCALE, lambda t: t.fill_(torch.nan), rf"tensor {SCALE} has values that are not finite"),
        (SCALE, lambda t: t.fill_(torch.inf), rf"tensor {SCALE} has values that are not finite"),
        (SCALE, lambda t: t.to(torch.int32), rf"tensor {SCALE} is stored as I32; scales are"),
        (SCALE, lambda t: t.to(F8), rf"tensor {SCALE} is stored as F8_E4M3; scales are"),
        (UP + "weight", lambda t: t.bfloat16(), "is stored as BF16, but has scales"),
        (UP + "weight", lambda t: t.to(torch.int8), "is stored as I8; only F32, F16 and BF16"),
        (UP + "weight", lambda t: (t.float() * torch.nan).to(F8), "not finite"),
        (UP + "weight", lambda t: t[:, :-1], r"weight_scale_inv is|weight is \[96, 63\]"),
    ],
)
def test_what_is_wrong_with_scales_is_named(
    spoiled: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None, wrong: str
) -> None:
    file = spoiled / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=wrong):
        load(spoiled, "none")


def test_a_truncated_file_of_scales_is_named(spoiled: Path) -> None:
    file = spoiled / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete"):
        load(spoiled, "none")


def test_eight_bits_in_a_module_that_is_not_quantised_are_named(spoiled: Path) -> None:
    config = json.loads((spoiled / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(UP.removesuffix("."))
    (spoiled / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is stored as F8_E4M3; only"):
        load(spoiled, "none")


def test_the_formats_here_quantise_what_they_should(pair: Pair) -> None:
    tensors = load_file(pair("fp8 blocks")[0] / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in tensors.items() if is_projection(name)}
    assert list(kinds.values()).count(F8) == 20 and len(kinds) == 21
