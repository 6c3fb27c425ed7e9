"""Reads the scales for an 8-bit KV cache that a checkpoint may contain (`k_scale` and `v_scale`, as
written by llm-compressor).
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from saccade.core.errors import CheckpointError
from saccade.runtime.weights.tensors import weight_files

NAME = re.compile(r"\.layers\.(\d+)\.self_attn\.([kv])_scale$")


def read_kv_scales(folder: Path, layers: int) -> tuple[tuple[float, float], ...]:
    """Return the scales (keys, values) of each layer, or () if the checkpoint has no scales.

    Raises CheckpointError unless each layer has two scales, which are numbers above 0.

    layers: the number of layers that cache keys and values.
    """
    found: dict[tuple[int, str], float] = {}
    for path in weight_files(folder):
        try:
            file = safe_open(path, framework="pt", device="cpu")
            for name in list(file.keys()):
                if match := NAME.search(name):
                    number, which = match.groups()
                    found[int(number), which] = _scale(path, name, file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or incomplete: {error}") from error
    if not found:
        return ()
    numbers = sorted({number for number, _ in found})
    if len(found) != 2 * layers or len(numbers) != layers:
        raise CheckpointError(
            f"{folder}: {len(found)} tensors k_scale and v_scale for {layers} layers: the "
            "checkpoint is incomplete; use --kv-cache-dtype auto"
        )
    return tuple((found[number, "k"], found[number, "v"]) for number in numbers)


def _scale(path: Path, name: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise CheckpointError(
            f"{path}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but each layer must "
            "have one scale for its keys and one for its values; use --kv-cache-dtype auto"
        )
    scale = float(tensor)
    if not (math.isfinite(scale) and scale > 0):
        raise CheckpointError(f"{path}: tensor {name} is {scale}: a scale must be above 0")
    return scale
