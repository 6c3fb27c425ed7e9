"""Loading weights: what is missing, misshapen, damaged or left over is named; dummy weights need
only the configuration.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.core.errors import CheckpointError
from saccade.families.qwen_vl.net import QwenVLModel
from saccade.families.registry import load_spec
from saccade.kernels.matrix import DenseMatrix
from saccade.nn.decoder import Decoder
from saccade.nn.family_model import FullNet
from saccade.nn.weights import Part
from saccade.runtime.weights import tensors
from saccade.runtime.weights.checkpoint_weights import CheckpointWeights, load_net
from saccade.runtime.weights.dummy import DummyWeights
from saccade_bench.lab.qwen import qwen
from tests.families.forwarding import CPU, Session, load
from tests.fixtures.tiny import picture


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {
        name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.language_model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        CheckpointError,
        match=r"no file has the tensor language_model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit(
        folder,
        lambda tensors: tensors.update(
            {"model.visual.blocks.0.attn.proj.weight": torch.zeros(48, 47)}
        ),
    )
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: tensor model\.visual\.blocks\.0\.attn\.proj\.weight is \[48, "
        r"47\].*\[48, 48\]",
    ):
        load(folder)


UP = "model.language_model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.uint8, "U8"),
        (torch.int8, "I8"),
        (torch.int32, "I32"),
        (torch.float64, "F64"),
    ],
)
def test_weights_in_a_format_that_cannot_be_read_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str
) -> None:
    edit(folder, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    monkeypatch.setattr(CheckpointWeights, "load", None)  # nothing is copied before
    with pytest.raises(CheckpointError, match=rf"tensor {UP} is stored as {name}; only F32, F16"):
        load(folder)


@pytest.mark.parametrize("place", [(), ("text_config",), ("vision_config",)])
def test_a_quantised_model_is_refused_by_its_method(folder: Path, place: tuple[str, ...]) -> None:
    config = json.loads((folder / "config.json").read_text())
    inner = config
    for name in place:
        inner = inner[name]
    inner["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    where = "config.json: " + "".join(f"{name}: " for name in place)
    with pytest.raises(CheckpointError, match=rf"{where}quantization_config: .*\(hqq\).*supported"):
        load_spec(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [UP, "model.visual.blocks.0.norm1.bias"])
def test_weights_that_are_not_finite_are_named(folder: Path, bad: float, name: str) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = bad

    edit(folder, spoil)
    with pytest.raises(CheckpointError, match=rf"tensor {name} has values that are not finite"):
        load(folder)


def test_weights_too_large_for_the_number_format_are_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors[UP].fill_(1e5))
    load(folder)
    with pytest.raises(CheckpointError, match=rf"{UP} .*not finite in float16 .*another --dtype"):
        load_net(load_spec(folder), folder, dtype=torch.float16, device=CPU)


def test_counters_of_old_checkpoints_stop_nothing(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.position_ids": torch.arange(8)}))
    load(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete"):
        load(folder)


def test_a_shard_that_is_not_there_is_named(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_vl", sharded=True), tmp_path / "model"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json lists missing files: model-00002"):
        load(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        load(folder)


def test_left_over_tensors_are_warned_of_and_harmless_ones_are_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(
        folder,
        lambda tensors: tensors.update(
            {"model.language_model.rotary_emb.inv_freq": torch.zeros(8)}
        ),
    )
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert not caplog.records
    edit(
        folder,
        lambda tensors: tensors.update({"model.language_model.extra.weight": torch.zeros(8)}),
    )
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert [
        record
        for record in caplog.messages
        if "1 tensors" in record and "language_model.extra.weight" in record
    ]


def test_names_of_every_age_mean_the_same() -> None:
    for name in (
        "model.layers.0.mlp.up_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
    ):
        assert QwenVLModel.canonical_name(name) == "language_model.layers.0.mlp.up_proj.weight"
    assert (
        QwenVLModel.canonical_name("model.visual.pos_embed.weight")
        == QwenVLModel.canonical_name("visual.pos_embed.weight")
        == "visual.pos_embed.weight"
    )
    assert QwenVLModel.canonical_name("lm_head.weight") == "lm_head.weight"


def test_weights_are_converted_and_owned(folder: Path) -> None:
    net = load_net(load_spec(folder), folder, dtype=torch.bfloat16, device=CPU)
    assert isinstance(net, FullNet) and isinstance(net.text, Decoder)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"].clone()
    (folder / "model.safetensors").write_bytes(b"")  # what was loaded no longer needs the file
    assert torch.equal(net.text.head.weight.dense(), stored.bfloat16())


def test_tied_weights_are_one_tensor(checkpoint: Callable[..., Path]) -> None:
    net = load(checkpoint("qwen3_vl", tie=True))
    assert isinstance(net, FullNet) and isinstance(net.text, Decoder)
    assert isinstance(net.text.head.weight, DenseMatrix)
    assert net.text.head.weight.values.data_ptr() == net.text.embedding.table.data_ptr()


@pytest.mark.parametrize("rows", [10**9, 2**31 - 1])
def test_a_vocabulary_beyond_all_memory_is_named(folder: Path, rows: int) -> None:
    """Before memory is asked for: no machine has it, or worse, one has."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = rows
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=rf"embed_tokens\.weight is \[600, 64\].*\[{rows}, 64\]"
    ):
        load(folder)


def test_weights_that_no_memory_holds_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"not enough memory .* x \[2147483647, 1048576\]"):
        DummyWeights(torch.float32, CPU).load(Part("x", (2**31 - 1, 1 << 20)))


def test_dummy_weights_need_the_configuration_only(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(checkpoint(family) / "config.json", tmp_path)
    spec = load_spec(tmp_path)
    nets = [
        load_net(spec, tmp_path, dtype=torch.float32, device=CPU, load_format="dummy")
        for _ in range(2)
    ]
    image = picture(4 * qwen(spec).images.factor, 4 * qwen(spec).images.factor)
    pad = spec.image_token_id  # type: ignore[attr-defined]
    logits = [
        Session(net, [1, 2, pad, 3], [np.asarray(image)], page_size=None).prefill() for net in nets
    ]
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0.1
    assert torch.equal(*logits)


def test_a_file_is_opened_once_to_describe_all_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"layer.{number}" for number in range(40)]
    save_file({name: torch.ones(3, 2) for name in names}, tmp_path / "model.safetensors")
    opened: list[Path] = []
    open_tensors = tensors.open_tensors

    def counted(path: Path) -> tensors.TensorFile:
        opened.append(path)
        return open_tensors(path)

    monkeypatch.setattr(tensors, "open_tensors", counted)
    files = tensors.TensorFiles(tmp_path, str)
    assert {files.describe(name) for name in names} == {("F32", (3, 2))}
    assert [*files.by_file()] == [(name, "F32", (3, 2)) for name in sorted(names)]
    assert len(opened) == 1
