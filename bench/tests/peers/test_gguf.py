"""The GGUF file that llama.cpp is given to run beside Saccade: every tensor of the language model,
under llama.cpp's names, in its own shape, with the numbers that the model is built by.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from saccade.families.qwen_vl.net import QwenVLModel
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.peers.gguf import Dtype, gguf_name, write_gguf

LAYER = {"attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output"}
LAYER |= {"ffn_gate", "ffn_up", "ffn_down"}


@pytest.mark.parametrize(
    ("preset", "layers", "own"),
    [
        ("tiny-qwen3-vl", 3, {"attn_q_norm.weight", "attn_k_norm.weight"}),
        ("tiny-qwen2.5-vl", 2, {"attn_q.bias", "attn_k.bias", "attn_v.bias"}),
    ],
)
def test_names_are_llama_cpps(preset: str, layers: int, own: set[str], tmp_path: Path) -> None:
    folder = make_checkpoint(preset, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")

    found = {gguf_name(QwenVLModel.canonical_name(name)) for name in stored} - {None}

    inside = {f"{module}.weight" for module in LAYER} | own
    outside = {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert found == outside | {f"blk.{i}.{name}" for i in range(layers) for name in inside}


def test_like_shapes_are_not_mixed_up() -> None:
    layer = "language_model.layers.11"
    for canonical, name in (
        ("mlp.gate_proj.weight", "ffn_gate.weight"),
        ("mlp.up_proj.weight", "ffn_up.weight"),
        ("self_attn.k_proj.bias", "attn_k.bias"),
        ("self_attn.v_proj.bias", "attn_v.bias"),
        ("self_attn.q_norm.weight", "attn_q_norm.weight"),
        ("input_layernorm.weight", "attn_norm.weight"),
        ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ):
        assert gguf_name(f"{layer}.{canonical}") == f"blk.11.{name}"
    assert gguf_name("visual.blocks.0.norm1.weight") is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_file_holds_the_checkpoints_numbers(dtype: Dtype, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder = make_checkpoint("tiny-qwen3-vl", tmp_path / "model")
    path = tmp_path / "model.gguf"

    write_gguf(folder, path, dtype)

    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert fields["qwen3.block_count"] == 3
    assert fields["qwen3.attention.head_count"] == 4
    assert fields["qwen3.attention.head_count_kv"] == 2
    assert fields["qwen3.attention.key_length"] == 16
    assert fields["qwen3.rope.freq_base"] == 1e6
    assert fields["qwen3.vocab_size"] == 1024
    written = {tensor.name: tensor for tensor in reader.tensors}
    expected = {
        gguf_name(QwenVLModel.canonical_name(name)): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    expected.pop(None)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        found = written[name]
        assert [int(side) for side in found.shape[::-1]] == list(tensor.shape)
        small = tensor.ndim == 1 or dtype == "float32"
        assert found.tensor_type.name == ("F32" if small else "BF16")
        values = torch.from_numpy(np.array(found.data))
        values = values if small else values.view(torch.bfloat16)
        assert torch.equal(values.float(), tensor.float())
