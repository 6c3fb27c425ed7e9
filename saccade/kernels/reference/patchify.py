"""Splits pixels into normalized patches, on the network's device.

In float32, results are bit-identical to transformers' image processors (tested).
"""

from __future__ import annotations

import torch


def patchify(
    image: torch.Tensor,
    patch: int,
    merge: int,
    frames: int,
    mean: torch.Tensor,
    std: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return normalized patches [N, 3 * frames * patch * patch] in merged order.

    In merged order, the merge x merge patches of a token are contiguous, row by row.

    image: a still image, uint8 [H, W, 3], which is repeated for all frames of a patch, or the
        frames of a video, uint8 [frames, H, W, 3].
    mean, std: [3] float32, for pixel values from 0 to 255.
    """
    stack = image if image.dim() == 4 else image[None]
    channels = image.shape[-1]
    # Reorder pixels while they are bytes, before conversion makes them four times as large.
    cut = [cut_patches(each, patch, merge).view(-1, channels, 1, patch * patch) for each in stack]
    pixels = (cut[0] if len(cut) == 1 else torch.cat(cut, dim=2)).float()
    normal = pixels.sub_(mean.view(channels, 1, 1)).div_(std.view(channels, 1, 1)).to(dtype)
    return normal.expand(-1, -1, frames, -1).reshape(normal.shape[0], -1)


def centre_patches(
    frames: torch.Tensor, patch: int, merge: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the bytes of each patch minus 128, which any float dtype represents exactly.

    The result is [N, F * 3 * patch * patch] in merged order, frame by frame within a patch.

    frames: uint8 [F, H, W, 3].
    """
    cut = [cut_patches(frame, patch, merge) for frame in frames]
    return (cut[0] if len(cut) == 1 else torch.cat(cut, dim=1)).to(dtype).sub_(128)


def cut_patches(image: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """Return the bytes of each patch of an image, [N, 3 * patch * patch] in merged order.

    image: uint8 [H, W, 3].
    """
    height, width, channels = image.shape
    cut = image.view(
        height // (merge * patch), merge, patch, width // (merge * patch), merge, patch, channels
    )
    return cut.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)
