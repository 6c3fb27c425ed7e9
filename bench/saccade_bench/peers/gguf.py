"""The language model of a Qwen-VL checkpoint as a GGUF file, for llama.cpp to run beside Saccade.

    python -m saccade_bench.peers.gguf FOLDER FILE.gguf [--dtype bfloat16]

Owns the names and the metadata that llama.cpp's `qwen2` and `qwen3` want; needs the package `gguf`
from PyPI. The file has no tokenizer: what it is given are token ids. No vision tower, and positions
are those of text: all three axes alike, which makes mRoPE the plain rotary embedding. Quantised
files are made of this one by llama.cpp itself (`llama_cpp.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import safe_open

from saccade.families.qwen_vl.net import QwenVLModel
from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.families.registry import load_spec
from saccade.nn.text_config import TextConfig

Dtype = Literal["bfloat16", "float32"]

OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm"}
"""Modules outside the layers, by their names under `language_model.`."""
INSIDE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Name:
    """A tensor of the checkpoint, and its name in the GGUF file."""

    stored: str
    gguf: str


def architecture(config: TextConfig) -> str:
    return "qwen3" if config.qk_norm else "qwen2"


def gguf_name(canonical: str) -> str | None:
    """The tensor's name in GGUF; None outside of the language model. Raises KeyError for a module
    without a name in llama.cpp.
    """
    module, _, kind = canonical.rpartition(".")
    if module == "lm_head":
        return f"output.{kind}"
    room, _, rest = module.partition(".")
    if room != "language_model":
        return None
    if not rest.startswith("layers."):
        return f"{OUTSIDE[rest]}.{kind}"
    _, layer, inner = rest.split(".", 2)
    return f"blk.{layer}.{INSIDE[inner]}.{kind}"


def metadata(config: TextConfig) -> dict[str, int | float]:
    """Without the architecture's prefix."""
    return {
        "block_count": config.layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden,
        "feed_forward_length": config.intermediate,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }


def tensor_names(file: Any) -> Iterator[Name]:
    for stored in file.keys():  # noqa: SIM118 (a safetensors file is no dictionary)
        if (found := gguf_name(QwenVLModel.canonical_name(stored))) is not None:
            yield Name(stored, found)


def write_gguf(folder: Path, path: Path, dtype: Dtype = "bfloat16") -> None:
    """Write the language model of the checkpoint in `folder`, whose weights are not quantised.

    Matrices are written in `dtype`, vectors in float32, as llama.cpp does.
    """
    import gguf

    config = cast(QwenVLSpec, load_spec(folder)).text
    writer = gguf.GGUFWriter(path, architecture(config))
    for key, value in metadata(config).items():
        name = f"{architecture(config)}.{key}"
        if isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    kind = gguf.LlamaFileType.MOSTLY_BF16 if dtype == "bfloat16" else gguf.LlamaFileType.ALL_F32
    writer.add_file_type(kind)
    writer.add_tokenizer_model("none")
    for source in sorted(folder.glob("*.safetensors")):
        with safe_open(source, framework="pt") as file:
            for tensor in tensor_names(file):
                add_tensor(writer, tensor.gguf, file.get_tensor(tensor.stored), dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: Any, name: str, tensor: torch.Tensor, dtype: Dtype) -> None:
    import gguf

    if tensor.ndim == 1 or dtype == "float32":
        writer.add_tensor(name, tensor.float().numpy())
        return
    values: np.ndarray = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    write_gguf(args.folder, args.file, args.dtype)


if __name__ == "__main__":
    main()
