"""Inputs and outputs of vision encoders: embeds patches, orders them, and splits results by
image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from saccade.core.types import Size
from saccade.kernels.device import send
from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.reference.patchify import patchify
from saccade.nn.linear import Linear
from saccade.nn.protocol import GridFacts, VisionNet
from saccade.nn.shapes import Colours
from saccade.nn.weights import Part, Weights


def merged_order(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of each patch [height * width], in merged order.

    In merged order, the merge x merge patches of a token are contiguous.
    """
    places = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    row, column = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return row, column


def region_blocks(*regions: tuple[int, int, int, int]) -> np.ndarray:
    """Return the index on the canvas of each token's block of pixels, [M].

    Tokens are ordered by view.

    regions: grids of equal views, stacked vertically on the canvas. Each has (views down, views
        across, tokens down per view, tokens across per view).
    """
    width = max(across * wide for _, across, _, wide in regions)
    found, above = [], 0
    for down, across, tall, wide in regions:
        table = above * width + np.arange(down * tall * width).reshape(down * tall, width)
        views = table[:, : across * wide].reshape(down, tall, across, wide)
        found.append(views.swapaxes(1, 2).reshape(-1))
        above += down * tall
    return np.concatenate(found)


def fit_positions(
    square: torch.Tensor, size: Size, merge: int, mode: str, *, antialias: bool = False
) -> torch.Tensor:
    """Resize learned positions [rows, columns, hidden] to the `size` of an image in patches.

    Returns [N, hidden] in merged order.
    """
    flat = square.flatten(0, 1)
    if square.shape[:2] != size:
        table = square.permute(2, 0, 1)[None].float()
        found = F.interpolate(table, size, mode=mode, align_corners=False, antialias=antialias)
        flat = found[0].flatten(1).t().to(square.dtype)
    row, column = merged_order(*size, merge)
    return flat.index_select(0, send(row * size[1] + column, square.device))


class PatchKernel:
    """Embeds patches with a convolution over normalized pixels, whose stride is its kernel size."""

    __slots__ = ("dtype", "linear", "mean", "merge", "patch", "std")

    def __init__(
        self,
        weights: Weights,
        name: str,
        sizes: tuple[int, int, int],
        colours: Colours,
        *,
        flat: bool = False,
        frames: int = 1,
    ) -> None:
        """Load the kernel.

        sizes: the hidden size, the side of a patch in pixels, and the side of a token in patches.
        flat: True if the file stores a matrix whose inputs are channels-last.
        frames: the temporal size of the stored kernel, over which it is summed, because a still
            image repeats its only frame.
        """
        hidden, self.patch, self.merge = sizes
        self.dtype = weights.dtype
        self.mean, self.std = (
            torch.tensor(values, device=weights.device) * 255.0 for values in colours
        )
        shape = self.patch, self.patch
        if flat:
            kernel = weights.load(Part(f"{name}.weight", (hidden, 3 * self.patch**2)))
            kernel = kernel.view(hidden, *shape, 3).permute(0, 3, 1, 2).contiguous()
        elif frames > 1:
            slices = weights.load(Part(f"{name}.weight", (hidden, 3, frames, *shape)))
            kernel = slices.float().sum(dim=2).to(self.dtype)
        else:
            kernel = weights.load(Part(f"{name}.weight", (hidden, 3, *shape)))
        bias = weights.load(Part(f"{name}.bias", (hidden,)))
        self.linear = Linear(weights.ops, DenseMatrix(kernel.view(hidden, -1)), bias)

    def cut(self, pixels: torch.Tensor) -> torch.Tensor:
        """Split pixels uint8 [H, W, 3] into normalized patches [N, 3 * patch^2], in merged
        order.
        """
        return patchify(pixels, self.patch, self.merge, 1, self.mean, self.std, self.dtype)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embedded patches [N, hidden] of pixels uint8 [H, W, 3]."""
        return self.linear(self.cut(pixels))


def split_images(
    net: VisionNet, embeddings: torch.Tensor, facts: Sequence[GridFacts]
) -> tuple[torch.Tensor, ...]:
    """Split the rows of images that were encoded together by image, without copying them."""
    counts = [net.rows(fact.num_patches) for fact in facts]
    return embeddings[: sum(counts)].split(counts)


def copy_images(
    net: VisionNet, embeddings: torch.Tensor, facts: Sequence[GridFacts]
) -> list[torch.Tensor]:
    """Implement `VisionNet.split` by copying each image's rows, without reordering them."""
    return [rows.clone() for rows in split_images(net, embeddings, facts)]
