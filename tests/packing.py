"""Checkpoints whose matrices lie packed in int32 (AWQ, GPTQ, compressed-tensors' pack-quantized),
made of tiny ones, each with its twin: the same numbers, unquantised. Shared by tests.

Written from the formats' descriptions, number by number, and sharing nothing with what reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.quantising import compressed, is_projection

Numbers = npt.NDArray[np.int64]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns lies in the k-th four bits."""


@dataclass(frozen=True)
class PackedFormat:
    """group 0: a scale per output. shuffled: inputs belong to groups in no order."""

    settings: Mapping[str, Any]
    layout: Literal["compressed", "gptq", "awq"]
    bits: int = 4
    group: int = 32
    zeros: bool = True
    less: int = 0
    shuffled: bool = False


def packing(strategy: str, bits: int, **weights: Any) -> dict[str, Any]:
    """Settings of llm-compressor's W4A16 and W8A16 checkpoints."""
    settings: dict[str, Any] = compressed("int", strategy, None, num_bits=bits, **weights)
    return settings | {"format": "pack-quantized"}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "modules_to_not_convert": ["visual"],
    "version": "gemm",
    "zero_point": True,
}
PACKED = {
    "w4a16": PackedFormat(packing("group", 4, group_size=32), "compressed", zeros=False),
    "w4a16 zero points": PackedFormat(
        packing("group", 4, group_size=16, symmetric=False), "compressed", group=16
    ),
    "w4a16 actorder": PackedFormat(
        packing("group", 4, group_size=32, actorder="group"),
        "compressed",
        zeros=False,
        shuffled=True,
    ),
    "w8a16 channels": PackedFormat(packing("channel", 8), "compressed", 8, 0, zeros=False),
    "awq": PackedFormat(AWQ, "awq"),
    "gptq": PackedFormat(GPTQ, "gptq", less=1),
    "gptq_v2 desc_act": PackedFormat(
        GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}, "gptq", shuffled=True
    ),
    "gptq 8 bits": PackedFormat(GPTQ | {"bits": 8, "group_size": -1}, "gptq", 8, 0, less=1),
}


def pack(numbers: Numbers, bits: int, axis: int, places: tuple[int, ...] = ()) -> torch.Tensor:
    """int32 words of numbers below 2 ** bits, 32 / bits neighbours along `axis` in each."""
    each = 32 // bits
    lines = np.moveaxis(numbers, axis, -1)
    short = -lines.shape[-1] % each
    lines = np.pad(lines, ((0, 0), (0, short))).reshape(lines.shape[0], -1, each)
    words = np.zeros(lines.shape[:2], np.int64)
    for k, place in enumerate(places or range(each)):
        words |= lines[:, :, place] << (k * bits)
    packed = words.astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)))


def quantise_packed(
    folder: Path,
    format: PackedFormat,
    out: Path,
    chosen: Callable[[str], bool] = is_projection,
) -> tuple[Path, Path]:
    """(quantised, twin) of the float checkpoint in `folder`, below `out`."""
    quantised, twin = (Path(shutil.copytree(folder, out / name)) for name in ("quantised", "twin"))
    tensors = load_file(folder / "model.safetensors")
    stored, whole = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if chosen(name) and "layers.1.self_attn.k_proj" not in name:
            module = name.removesuffix("weight")
            del stored[name]
            whole[name], pieces = _quantise(weight, format)
            stored |= {module + suffix: piece for suffix, piece in pieces.items()}
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file(whole, twin / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((quantised / "config.json").read_text())
    settings["quantization_config"] = format.settings
    (quantised / "config.json").write_text(json.dumps(settings))
    return quantised, twin


def _quantise(
    weight: torch.Tensor, format: PackedFormat
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the numbers mean [out, in], and the tensors that hold them, by suffix."""
    outputs, inputs = weight.shape
    size = format.group or inputs
    group = np.arange(inputs) // size
    if format.shuffled:
        group = np.random.default_rng(0).permutation(group)
    count, most = -(-inputs // size), (1 << format.bits) - 1
    scales = torch.zeros(outputs, count, dtype=torch.float16)
    zeros = np.full((outputs, count), 1 << (format.bits - 1), np.int64)
    numbers, made = np.zeros(weight.shape, np.int64), torch.zeros_like(weight)
    for each in range(count):
        columns = torch.from_numpy(np.flatnonzero(group == each))
        piece = weight[:, columns]
        low, high = piece.amin(1).clamp_max(0), piece.amax(1).clamp_min(0)
        scale = (high - low if format.zeros else 2 * piece.abs().amax(1)) / most
        scales[:, each] = scale
        wide = scales[:, each].float().unsqueeze(1)
        if format.zeros:
            zeros[:, each] = (-low / wide[:, 0]).round().clamp(1, most).numpy()
        shift = torch.from_numpy(zeros[:, each : each + 1])
        picked = ((piece / wide).round() + shift).clamp(0, most)
        numbers[:, columns.numpy()] = picked.numpy()
        made[:, columns] = (picked - shift) * wide
    places = AWQ_COLUMNS if format.layout == "awq" else ()
    if format.layout == "compressed":
        pieces = {
            "weight_packed": pack(numbers, format.bits, 1),
            "weight_scale": scales.contiguous(),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if format.zeros:
            pieces["weight_zero_point"] = pack(zeros, format.bits, 0)
        if format.shuffled:
            pieces["weight_g_idx"] = torch.from_numpy(group).int()
        return made, pieces
    pieces = {
        "qweight": pack(numbers.T, format.bits, int(format.layout == "awq"), places),
        "qzeros": pack(zeros.T - format.less, format.bits, 1, places),
        "scales": scales.t().contiguous(),
    }
    if format.layout == "gptq":
        pieces["g_idx"] = torch.from_numpy(group).int()
    return made, pieces
