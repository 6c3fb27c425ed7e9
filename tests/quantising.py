"""Checkpoints in the formats of quantised models, made of tiny ones, each with its twin: the same
numbers, unquantised. Shared by tests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.torch_version import TorchVersion

SCALES_BY_ROWS = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.12"),
    reason="before torch 2.12 a CPU's products of 8 bits take one scale for all rows",
)


LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class Format:
    """`settings` are config.json's; `block` rows and columns share a scale, 0: all of them."""

    settings: Mapping[str, Any]
    stored: torch.dtype
    block: tuple[int, int]
    suffix: str
    scale: torch.dtype = torch.float32


def compressed(kind: str, strategy: str, rows: Mapping[str, Any] | None, **weights: Any) -> Any:
    """The settings of llm-compressor's checkpoints."""
    group = {
        "input_activations": rows,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            "actorder": None,
            "dynamic": False,
            "num_bits": 8,
            "strategy": strategy,
            "symmetric": True,
            "type": kind,
        }
        | weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "ignore": ["lm_head", "re:.*visual.*", "model.language_model.layers.1.self_attn.k_proj"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


def token(kind: str) -> dict[str, Any]:
    return {
        "dynamic": True,
        "num_bits": 8,
        "strategy": "token",
        "symmetric": True,
        "type": kind,
    }


F8, I8 = torch.float8_e4m3fn, torch.int8
FORMATS = {
    "fp8 blocks": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [16, 24],
            "modules_to_not_convert": ["lm_head", "model.visual"],
        },
        F8,
        (16, 24),
        "weight_scale_inv",
        torch.bfloat16,
    ),
    "fp8 blocks of products": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [16, 32],
            "modules_to_not_convert": ["lm_head", "model.visual"],
        },
        F8,
        (16, 32),
        "weight_scale_inv",
    ),
    "fp8 blocks of 128": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.visual"],
        },
        F8,
        (128, 128),
        "weight_scale_inv",
    ),
    "w8a8 int8": Format(
        compressed("int", "channel", token("int")), I8, (1, 0), "weight_scale", torch.bfloat16
    ),
    "w8a16 int8 groups": Format(
        compressed("int", "group", None, group_size=16), I8, (1, 16), "weight_scale"
    ),
    "fp8 channels": Format(
        compressed("float", "channel", token("float")), F8, (1, 0), "weight_scale"
    ),
    "fp8 tensor": Format(
        compressed("float", "tensor", token("float") | {"strategy": "tensor", "dynamic": False}),
        F8,
        (0, 0),
        "weight_scale",
    ),
}


def is_projection(name: str) -> bool:
    """Of matrices, and of the fused ones of experts."""
    return (
        ".layers." in name
        and "visual" not in name
        and (name.endswith("_proj.weight") or (".experts." in name and name.endswith("_proj")))
    )


def quantise(
    folder: Path, format: Format, out: Path, chosen: Callable[[str], bool] = is_projection
) -> tuple[Path, Path]:
    """(quantised, twin) of the float checkpoint in `folder`, below `out`."""
    quantised, twin = (Path(shutil.copytree(folder, out / name)) for name in ("quantised", "twin"))
    tensors = load_file(folder / "model.safetensors")
    stored, whole = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not chosen(name) or "layers.1.self_attn.k_proj" in name:
            continue
        each = [_by_blocks(matrix, format) for matrix in weight.view(-1, *weight.shape[-2:])]
        values, scales, made = (
            torch.stack(found) if weight.dim() > 2 else found[0] for found in zip(*each)
        )
        stored[name], whole[name] = values, made
        stored[name + format.suffix.removeprefix("weight")] = scales.to(format.scale)
        if format.stored == F8 and format.block == (0, 0):
            stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file(whole, twin / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((quantised / "config.json").read_text())
    settings["quantization_config"] = format.settings
    (quantised / "config.json").write_text(json.dumps(settings))
    return quantised, twin


def _by_blocks(
    weight: torch.Tensor, format: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(what is stored, its scales, what both mean) of one matrix."""
    rows, columns = weight.shape
    high, wide = format.block[0] or rows, format.block[1] or columns
    scales = torch.zeros(-(-rows // high), -(-columns // wide))
    values, made = torch.zeros_like(weight, dtype=format.stored), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scale = (weight[place].abs().max() / LARGEST[format.stored]).to(format.scale)
            scales[i, j] = scale
            number = weight[place] / scale.float()
            if format.stored == torch.int8:
                number = number.round().clamp(-127, 127)
            values[place] = number.to(format.stored)
            made[place] = values[place].float() * scale.float()
    return values, scales.flatten() if format.block == (0, 0) else scales, made
