"""Matrices of a GGUF file stay in few bits where products take these: Q4_0 number for number, other
blocks as 8 bits for each output, whose loss start-up tells; whole where the user wants that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from saccade.families.qwen_vl.net import QwenVLModel
from saccade.kernels.matrix import DenseMatrix, Int4Matrix, Int8Matrix
from saccade.kernels.ops import pick_ops
from saccade.nn.weights import Part
from saccade.plugins.cpu import quantized_ops
from saccade.plugins.cpu.vnni_layout import Int4Panels
from saccade.plugins.gguf.folder import write_folder
from saccade.runtime.weights import checkpoint_weights as weights
from saccade.runtime.weights.checkpoint_weights import CheckpointWeights
from saccade.runtime.weights.quant_policy import LoadTally, QuantPolicy
from tests.families.forwarding import CPU
from tests.fixtures.gguf_files import write_files
from tests.fixtures.harness import set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.helpers.processor import needs_int8, needs_vnni
from tests.runtime.test_quantized import answers, load, logits, projections

Pair = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def pair(gguf_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """(the folder that stands for the files, the same weights as safetensors) by format."""
    set_threads()

    @cache
    def made(kind: str) -> tuple[Path, Path]:
        base = tmp_path_factory.mktemp(kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(base))
            files = write_files(gguf_checkpoint("qwen3_vl"), base, Kind[kind], Kind.F32)
            return write_folder([files.model], files.mmproj), files.rounded

    return made


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take matrices of 4 bits, as on a GPU."""
    monkeypatch.setattr(weights, "has_int4", lambda *_: True)
    monkeypatch.setattr(quantized_ops, "has_vnni", lambda: False)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bits_stay_number_for_number_where_products_take_them(pair: Pair, kind: str) -> None:
    folder, twin = pair(kind)
    net, line = load(folder, "auto")
    whole, _ = load(twin, "none")
    torch.testing.assert_close(logits(net), logits(whole), atol=1e-4, rtol=1e-4)
    assert answers(net) == answers(whole)
    assert line.startswith("12 matrices of the language model in int4, as the checkpoint has them")
    assert {type(each) for each in projections(net)} == {Int4Matrix}


@pytest.mark.usefixtures("four")
def test_heads_in_llama_cpps_order_stay_in_four_bits(
    gguf_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of whole blocks are put in order, as values are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = write_files(gguf_checkpoint("qwen3_5"), tmp_path, Kind.Q4_1, Kind.F32)
    net, line = load(write_folder([files.model], files.mmproj), "auto")
    whole, _ = load(files.rounded, "none")
    assert line.startswith("13 matrices of the language model in int4, as the checkpoint has them")
    torch.testing.assert_close(logits(net), logits(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("four")
def test_two_ranks_cut_q4_0_at_groups_or_make_it_whole(pair: Pair) -> None:
    folder, twin = pair("Q4_0")
    whole, _ = load(twin, "none")
    rank_group = ThreadRankGroup(folder, 2, "data", quantization="auto")
    assert answers(whole, rank_group) == answers(whole)


@needs_vnni
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bits_are_multiplied_as_they_are_on_a_cpu(pair: Pair, kind: str) -> None:
    net, line = load(pair(kind)[0], "auto", torch.bfloat16)
    assert "in int4, as the checkpoint has them" in line and "off by" not in line
    assert Int4Panels in {type(each) for each in projections(net)}


@needs_int8
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
def test_other_blocks_become_eight_bits_and_start_up_tells_the_loss(
    pair: Pair, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = pair(kind)
    caplog.set_level(logging.DEBUG, "saccade.plugins.gguf.blocks")
    net, line = load(folder, "auto", torch.bfloat16)
    assert all(isinstance(each, Int8Matrix) for each in projections(net))
    assert "matrices of the language model in int8, made at load" in line
    assert "21 matrices of the file are off by 0." in line and "--quantization none" in line
    assert len(caplog.records) == 21 and f": {kind} in int8, 0." in caplog.text


def test_values_are_read_in_inference_mode_too(pair: Pair) -> None:
    folder, twin = pair("Q8_0")
    part = Part("language_model.layers.1.mlp.up_proj.weight", (96, 64))
    with torch.inference_mode():
        found, expected = (
            CheckpointWeights(each, QwenVLModel.canonical_name, torch.float32, CPU).load(part)
            for each in (folder, twin)
        )
    assert found.equal(expected)


@needs_int8
def test_products_with_them_are_those_with_the_files_numbers(pair: Pair) -> None:
    folder, twin = pair("Q8_0")
    part = Part("language_model.layers.1.mlp.up_proj.weight", (96, 64))
    ops = pick_ops(CPU, torch.bfloat16)
    policy = QuantPolicy(lambda _: True, made=None, native=True, tally=LoadTally())
    tensors = CheckpointWeights(
        folder, QwenVLModel.canonical_name, torch.bfloat16, CPU, policy=policy, ops=ops
    )
    matrix = tensors.load_matrix(part).ready(ops)
    exact = CheckpointWeights(twin, QwenVLModel.canonical_name, torch.float32, CPU).load(part)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, expected = matrix.multiply(ops, x).float(), x.float() @ exact.T
    assert isinstance(matrix, Int8Matrix)
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert 0 < policy.tally.losses[part.name] < 0.01


@pytest.mark.parametrize("mode", ["none", "auto"])
def test_matrices_are_whole_where_the_user_wants_that_or_float32(pair: Pair, mode: str) -> None:
    folder, twin = pair("Q8_0")
    net, line = load(folder, mode)  # type: ignore[arg-type]
    assert logits(net).equal(logits(load(twin, "none")[0]))
    assert {type(each) for each in projections(net)} == {DenseMatrix}
    assert "quantized matrices of the checkpoint converted to float32 at load" in line


@needs_vnni
def test_all_may_be_made_four_bits(pair: Pair) -> None:
    _, line = load(pair("Q8_0")[0], "int4", torch.bfloat16)
    assert "in int4, made at load" in line
