"""Pixels to patches: rescale, normalise and cut up on the network's device. Owns nothing.

Bit-identical in float32 to transformers' image processor for these models (tested).
"""

from __future__ import annotations

import torch

from saccade.core.family import ImageRules


def patchify(image: torch.Tensor, rules: ImageRules, dtype: torch.dtype) -> torch.Tensor:
    """Normalised patches [N, 3 * temporal * patch * patch] of a still picture, uint8 [H, W, 3], in merged order.

    Merged order: the merge x merge patches that become one token stand together, row by row. A still picture fills all frames of a patch.
    """
    height, width, channels = image.shape
    p, m, t = rules.patch, rules.merge, rules.temporal_patch
    cut = image.view(height // (m * p), m, p, width // (m * p), m, p, channels).permute(0, 3, 1, 4, 6, 2, 5)
    pixels = cut.reshape(-1, channels, 1, p * p).float()  # bytes are moved before they become four times as large
    mean = torch.tensor(rules.mean, device=image.device).mul_(255.0).view(channels, 1, 1)
    std = torch.tensor(rules.std, device=image.device).mul_(255.0).view(channels, 1, 1)
    normal = pixels.sub_(mean).div_(std).to(dtype)
    return normal.expand(-1, -1, t, -1).reshape(normal.shape[0], -1)
