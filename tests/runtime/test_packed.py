"""Checkpoints of packed matrices (AWQ, GPTQ, compressed-tensors) answer as their unquantised twins,
whole, on two ranks and made int8; what does not fit together is named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.core.errors import CheckpointError
from saccade.kernels.matrix import Int4Matrix, Int8Matrix
from saccade.plugins.cpu import quantized_ops
from saccade.plugins.cpu.vnni_layout import Int4Panels
from saccade.runtime.weights import checkpoint_weights as weights
from tests.fixtures.harness import set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import make_checkpoint
from tests.helpers.breadth import broad
from tests.helpers.processor import needs_int8, needs_vnni
from tests.packing import PACKED, quantise_packed
from tests.runtime.test_quantized import answers, load, logits, projections

UP = "model.language_model.layers.1.mlp.up_proj."

Pair = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """(quantised, twin) by format."""
    set_threads()
    whole = make_checkpoint(tmp_path_factory.mktemp("whole"), "qwen3_vl")
    return cache(lambda name: quantise_packed(whole, PACKED[name], tmp_path_factory.mktemp("pair")))


@pytest.mark.first
@pytest.mark.parametrize("name", list(PACKED))
def test_a_packed_checkpoint_answers_as_its_twin(
    pair: Pair, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, twin = pair(name)
    net, line = load(quantised, "auto")
    assert not caplog.records, "every packed tensor belongs to its matrix"
    whole, _ = load(twin, "auto")
    assert torch.equal(logits(net), logits(whole))
    assert answers(net) == answers(whole)
    assert line.startswith("20 quantized matrices of the checkpoint converted to float32 at load: ")


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    broad(
        ["w4a16 actorder", "w4a16 zero points", "awq", "gptq_v2 desc_act"],
        ["awq", "w4a16 actorder"],
    ),
)
def test_two_ranks_answer_as_the_twin(pair: Pair, name: str) -> None:
    quantised, twin = pair(name)
    whole, _ = load(twin, "auto")
    rank_group = ThreadRankGroup(quantised, 2, "data")
    assert answers(whole, rank_group) == answers(whole)


@pytest.mark.more
@needs_vnni
@pytest.mark.parametrize("name", broad(["w4a16 actorder", "awq", "gptq"], keep=["awq"]))
def test_four_bits_stay_on_a_cpu_whose_rows_have_eight(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, twin = pair(name)
    net, line = load(quantised, "auto", torch.bfloat16)
    assert "matrices of the language model in int4, as the checkpoint has them" in line
    assert Int4Panels in {type(each) for each in projections(net)}
    plain, line = load(quantised, "none", torch.bfloat16)
    assert "quantized matrices of the checkpoint converted to bfloat16 at load" in line
    assert Int4Panels not in {type(each) for each in projections(plain)}, "rows have 16 bits then"
    # The same in float32, whose figures can be compared.
    monkeypatch.setattr(weights, "has_int4", lambda *_: True)
    net, _ = load(quantised, "auto")
    assert Int4Panels in {type(each) for each in projections(net)}
    expected, found = logits(load(twin, "none")[0]), logits(net)
    assert logits(load(quantised, "none")[0]).equal(expected)
    assert not found.equal(expected)
    assert (found - expected).norm() < 0.03 * expected.norm()
    assert len(answers(net, ThreadRankGroup(quantised, 2, "data"))[0]) == 24


FEW = [name for name, format in PACKED.items() if format.bits == 4 and format.group != 16]


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take matrices of 4 bits, as on a GPU."""
    monkeypatch.setattr(weights, "has_int4", lambda *_: True)
    monkeypatch.setattr(quantized_ops, "has_vnni", lambda: False)


@pytest.mark.first
@pytest.mark.parametrize("name", broad(FEW, keep=["awq", "w4a16 actorder"]))
def test_four_bits_stay_where_products_take_them(pair: Pair, name: str, four: None) -> None:
    quantised, twin = pair(name)
    net, line = load(quantised, "auto")
    whole, _ = load(twin, "auto")
    torch.testing.assert_close(logits(net), logits(whole), atol=1e-4, rtol=1e-4)
    assert answers(net) == answers(whole)
    assert line.startswith("11 matrices of the language model in int4, as the checkpoint has them")
    kinds = {type(each) for each in projections(net)}
    assert Int4Matrix in kinds and Int8Matrix not in kinds


@pytest.mark.more
@pytest.mark.parametrize("name", ["awq", "gptq_v2 desc_act"])
def test_two_ranks_cut_four_bits_at_groups_or_make_them_whole(
    pair: Pair, name: str, four: None
) -> None:
    quantised, twin = pair(name)
    whole, _ = load(twin, "auto")
    rank_group = ThreadRankGroup(quantised, 2, "data", quantization="auto")
    assert answers(whole, rank_group) == answers(whole)


def test_groups_that_no_product_takes_are_made_whole(pair: Pair, four: None) -> None:
    quantised, twin = pair("w4a16 zero points")
    net, line = load(quantised, "auto")
    assert line.startswith("20 quantized matrices") and line.endswith(
        "(scales of 16 inputs, not of a multiple of 32)"
    )
    assert torch.equal(logits(net), logits(load(twin, "auto")[0]))


@needs_int8
def test_packed_matrices_may_be_made_int8(pair: Pair) -> None:
    quantised, twin = pair("awq")
    net, line = load(quantised, "int8")
    assert all(isinstance(matrix, Int8Matrix) for matrix in projections(net))
    assert torch.equal(logits(net), logits(load(twin, "int8")[0]))
    assert "made at load" in line and "20 quantized matrices" in line


@pytest.mark.first
@pytest.mark.parametrize(
    ("format", "suffix", "change", "wrong"),
    [
        ("gptq", "scales", None, "no file has the tensor .*up_proj.scales, the scales of"),
        ("gptq", "scales", lambda t: t[:-1], r"scales is \[1, 96\], but .* must be \[2, 96\]"),
        ("gptq", "scales", lambda t: t * torch.nan, "scales has values that are not finite"),
        ("gptq", "scales", lambda t: t.int(), "scales is stored as I32; the scales of packed"),
        ("gptq", "qzeros", lambda t: t[:, :-1], r"qzeros is \[2, 11\], but .* \[2, 12\]"),
        ("gptq", "qzeros", lambda t: t.float(), "qzeros is stored as F32; the zeros of packed"),
        ("gptq", "qweight", lambda t: t[:-1], r"qweight is \[7, 96\], but .* \[8, 96\]"),
        ("gptq", "g_idx", lambda t: t + 1, r"g_idx names groups from 1 to 2, but has 2"),
        ("gptq", "weight", lambda t: t, "up_proj.qweight is there, and the same .* as well"),
        ("gptq_v2 desc_act", "g_idx", None, "no file has the tensor .*g_idx, the order of"),
        ("awq", "qweight", lambda t: t[:, :-1], r"qweight is \[64, 11\], but .* \[64, 12\]"),
        ("w4a16", "weight_scale", lambda t: t[:, :1], r"weight_scale is \[96, 1\], but"),
        ("w4a16", "weight_shape", lambda t: t.flip(0), r"weight_shape says \[64, 96\], but"),
        ("w4a16 zero points", "weight_zero_point", None, "weight_zero_point, the zeros of"),
    ],
)
def test_what_does_not_fit_together_is_named(
    pair: Pair,
    tmp_path: Path,
    format: str,
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    wrong: str,
) -> None:
    folder = Path(shutil.copytree(pair(format)[0], tmp_path / "model"))
    tensors = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    if change is None:
        del tensors[UP + suffix]
    else:
        tensors[UP + suffix] = change(tensors.get(UP + suffix, torch.ones(1))).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=wrong):
        load(folder, "auto")


def test_a_packed_matrix_that_config_ignores_is_named(pair: Pair, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair("awq")[0], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(UP.removesuffix("."))
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"up_proj\.qweight is stored as I32; only"):
        load(folder, "auto")


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_only_biases_of_zeros_are_passed_over_in_silence(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    folder = Path(shutil.copytree(pair("gptq")[0], tmp_path / "model"))
    tensors = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    tensors[UP + "bias"] = torch.full((96,), value)
    save_file(tensors, folder / "model.safetensors")
    load(folder, "auto")
    assert ("up_proj.bias" in caplog.text) == (value != 0.0)
