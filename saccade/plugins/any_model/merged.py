"""Merges a LoRA adapter for images, which a checkpoint stores in a directory next to its base
weights.

It is merged into the model's weights at load, so it applies to all requests. The code is the same
for all models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from saccade.families.checkpoint import IMAGES_ADAPTER
from saccade.nn.adapter_files import read_adapter


def merge_adapter(model: Any, folder: Path) -> bool:
    """Merge the image adapter in `folder` into the model's weights, and return True.

    Returns False if there is none. Raises CheckpointError if it cannot be read.
    """
    if not (folder / IMAGES_ADAPTER).is_dir():
        return False
    layers = {
        name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)
    }
    shapes = {name: (each.out_features, each.in_features) for name, each in layers.items()}
    found = read_adapter(folder / IMAGES_ADAPTER, shapes, lambda name: name)
    with torch.no_grad():
        for name, factors in found.factors.items():
            weight = layers[name].weight
            added = factors.b.float() @ factors.a.float() * factors.scale
            weight.copy_(weight.float() + added)
    return True
