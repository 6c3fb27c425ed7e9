"""`saccade make-checkpoint --quantize`: quantize a checkpoint's matrices to FP8 by blocks, in the
format of Qwen3-VL-*-FP8. One file is read and written at a time.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional as F

from saccade.core.errors import ConfigError
from saccade.families.registry import family_model, load_spec
from saccade.kernels.matrix import FP8
from saccade.kernels.reference.fp8 import LARGEST, to_fp8
from saccade.runtime.weights.tensors import weight_files
from saccade_bench.lab.checkpoint import CPU, write_tensors

BLOCK = 128
"""Rows and columns of a block, whose values share a scale."""


def quantise_checkpoint(source: Path, folder: Path, device: torch.device = CPU) -> Path:
    """Write the checkpoint in `source` to `folder`, which must be empty, with the language model's
    matrices in FP8. They are quantized on `device`. Raises CheckpointError and ConfigError.
    """
    model = family_model(load_spec(source))
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise ConfigError(f"--model {source}: it is quantised already")
    files = weight_files(source)
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json" and "safetensors" not in path.name:
            shutil.copy(path, folder)
    places: dict[str, str] = {}
    for path in files:
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in list(file.keys()):
                tensors[name] = file.get_tensor(name)
                if ".layers." in name and model.projection(model.canonical_name(name)):
                    tensors[name], scales = quantise_blocks(tensors[name])
                    tensors[f"{name}_scale_inv"] = scales
        write_tensors(tensors, folder / path.name)
        places |= dict.fromkeys(tensors, path.name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.visual"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 values [out, in] and the blocks' scales in float32.

    The largest value of each block becomes the largest of FP8. A tensor of several experts is
    quantized one matrix at a time.
    """
    if weight.dim() > 2:
        each = [quantise_blocks(matrix) for matrix in weight]
        stacked = torch.stack([made.view(torch.uint8) for made, _ in each])
        return stacked.view(FP8), torch.stack([its for _, its in each])
    rows, columns = weight.shape
    wide = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    shape = wide.shape[0] // BLOCK, BLOCK, wide.shape[1] // BLOCK, BLOCK
    blocks = wide.view(shape)
    scales = blocks.abs().amax((1, 3)).div(LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    values = to_fp8(blocks, scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    return values[:rows, :columns].contiguous(), scales
