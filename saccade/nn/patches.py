"""What vision towers share: orders of patches, pixels as rows, and a block's work in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.reference.patchify import patchify
from saccade.kernels.tower_attention import Backend, varlen_attention
from saccade.nn.linear import Linear
from saccade.nn.protocol import Cut, GridFacts, Pieces, VisionNet
from saccade.nn.siglip_config import Colours
from saccade.nn.weights import Part, Weights

PROJECTION = 4
"""A block's projection to queries, keys and values is about this part of its cost, or less."""


def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put tensors of rows one below another. A single one is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def merged_order(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each patch's row and column, [height * width] each.

    A token's merge x merge patches stand together.
    """
    places = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    row, column = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return row, column


class PatchKernel:
    """A checkpoint's convolution over normalised pixels, as a matrix. Its stride is its kernel."""

    __slots__ = ("dtype", "linear", "mean", "merge", "patch", "std")

    def __init__(
        self, weights: Weights, name: str, sizes: tuple[int, int, int], colours: Colours
    ) -> None:
        """Load the kernel.

        sizes: values per row, pixels along a patch's edge, patches along a token's edge.
        """
        hidden, self.patch, self.merge = sizes
        self.dtype = weights.dtype
        self.mean, self.std = (
            torch.tensor(values, device=weights.device) * 255.0 for values in colours
        )
        kernel = weights.load(Part(f"{name}.weight", (hidden, 3, self.patch, self.patch)))
        bias = weights.load(Part(f"{name}.bias", (hidden,)))
        self.linear = Linear(weights.ops, DenseMatrix(kernel.view(hidden, -1)), bias)

    def cut(self, pixels: torch.Tensor) -> torch.Tensor:
        """Cut uint8 [H, W, 3] into patches [N, 3 * patch^2], in merged order, normalised."""
        return patchify(pixels, self.patch, self.merge, 1, self.mean, self.std, self.dtype)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map uint8 [H, W, 3] -> [N, hidden]."""
        return self.linear(self.cut(pixels))


def block_pieces(
    x: torch.Tensor,
    cuts: Sequence[Cut],
    attention: Backend,
    scale: float,
    project: Callable[[torch.Tensor, int], torch.Tensor],
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Pieces:
    """Do one block's work on x [N, hidden], cut by cut. Costs N, and returns [N, hidden].

    project: maps a cut's rows and its number to queries, keys and values [n, 3 H, D]. finish: maps
    a cut's rows and what they attended to [n, H * D] to the block's output.
    """
    projected = []
    for number, cut in enumerate(cuts):
        yield _share(cut)
        projected.append(project(x[cut.rows], number))
    qkv = together(projected)  # [N, 3 H, D]
    heads, found = qkv.shape[1] // 3, []
    for cut in cuts:
        yield cut.rows.stop - cut.rows.start - _share(cut)
        attended = varlen_attention(
            qkv[cut.rows, :heads],
            qkv[cut.keys, heads : 2 * heads],
            qkv[cut.keys, 2 * heads :],
            cut.segments,
            scale,
            attention,
        )
        found.append(finish(x[cut.rows], attended.flatten(1)))
    return together(found)


def _share(cut: Cut) -> int:
    """Return the projection's share of a block's cost."""
    return (cut.rows.stop - cut.rows.start) // PROJECTION


def tile_facts(tiles: int, rows: int, device: torch.device) -> GridFacts:
    """Return the facts of tiles with `rows` each, which attend within a tile and need no places."""
    places = torch.zeros((0, tiles * rows), dtype=torch.int64).to(device)
    return GridFacts(places, segments=((rows,) * tiles,))


def split_images(
    net: VisionNet, embeddings: torch.Tensor, facts: Sequence[GridFacts]
) -> tuple[torch.Tensor, ...]:
    """Split a pack's rows among its images."""
    counts = [net.rows(fact.num_patches) for fact in facts]
    return embeddings[: sum(counts)].split(counts)


def copy_images(
    net: VisionNet, embeddings: torch.Tensor, facts: Sequence[GridFacts]
) -> list[torch.Tensor]:
    """Copy each image's rows out of a pack. Answers `VisionNet.split` for rows in their order."""
    return [rows.clone() for rows in split_images(net, embeddings, facts)]
