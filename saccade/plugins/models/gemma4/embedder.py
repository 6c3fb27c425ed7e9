"""Gemma 4 12B's image embedder, which replaces a vision encoder.

It normalizes and projects each token's pixels, adds learned positions of the token's row and
column, and projects the sum. It has no attention, so an image's tokens are independent. Replicated
on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.reference.patchify import patchify
from saccade.nn.linear import Column, Linear
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import copy_images, merged_order
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.weights import Part, Weights
from saccade.parallel import UNSHARDED
from saccade.plugins.models.gemma4.config import EmbedderConfig
from saccade.plugins.models.gemma4.vision import UnitNorm

NAME = "vision_embedder"
EPS = 1e-5
"""Default epsilon of PyTorch's LayerNorm, which the checkpoint does not specify."""


class PixelNorm:
    """Scales the bytes of a token's pixels to the range from 0 to 1, and applies layer norm to all
    of them.
    """

    __slots__ = ("bias", "dtype", "mean", "std", "unit", "weight")

    def __init__(self, weights: Weights, name: str, unit: int) -> None:
        # In float32, because 16-bit formats cannot represent all of these values exactly.
        self.weight, self.bias = (
            planes(weights.load(Part(f"{name}.{each}", (3 * unit**2,))), unit).float()
            for each in ("weight", "bias")
        )
        self.mean, self.std = (
            torch.full((3,), value, device=weights.device) for value in (0.0, 255.0)
        )
        self.unit, self.dtype = unit, weights.dtype

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map uint8 [H, W, 3] to rows [N, 3 * unit^2]."""
        rows = patchify(pixels, self.unit, 1, 1, self.mean, self.std, torch.float32)
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, EPS).to(self.dtype)


def planes(values: torch.Tensor, unit: int) -> torch.Tensor:
    """Reorder values [..., 3 * unit^2] of a token's pixels from interleaved to planar colors."""
    cut = values.view(*values.shape[:-1], unit**2, 3)
    return cut.transpose(-1, -2).reshape(values.shape)


class ImageEmbedder:
    """Encodes uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`."""

    __slots__ = (
        "depth",
        "hidden",
        "linear",
        "norm",
        "pixel_norm",
        "place_norm",
        "positions",
        "project",
        "row_norm",
    )
    axes = 0
    longest_segments = ()

    def __init__(self, weights: Weights, config: EmbedderConfig) -> None:
        self.depth, self.hidden, unit = config.depth, config.hidden, config.unit
        self.pixel_norm = PixelNorm(weights, f"{NAME}.patch_ln1", unit)
        matrix = weights.load(Part(f"{NAME}.patch_dense.weight", (self.hidden, 3 * unit**2)))
        bias = weights.load(Part(f"{NAME}.patch_dense.bias", (self.hidden,)))
        self.linear = Linear(weights.ops, DenseMatrix(planes(matrix, unit)), bias)
        self.row_norm, self.place_norm = (
            LayerNorm(weights, f"{NAME}.{each}", self.hidden, EPS)
            for each in ("patch_ln2", "pos_norm")
        )
        table = Part(f"{NAME}.pos_embedding", (config.places, 2, self.hidden))
        self.positions = weights.load(table)  # of columns, of rows
        self.norm = UnitNorm(weights, self.hidden, config.norm_eps)
        column = Column("embed_vision.embedding_projection", config.out, UNSHARDED)
        self.project = Linear.columns(weights, [column], self.hidden, bias=False)

    def rows(self, patches: int) -> int:
        return patches

    def grid_facts(self, grid: Grid) -> GridFacts:
        device = self.positions.device
        height, width = grid
        row, column = (send(each, device) for each in merged_order(height, width, 1))
        across, down = self.positions[column, 0], self.positions[row, 1]
        places = torch.zeros((0, len(row)), dtype=torch.int64).to(device)
        return GridFacts(places, segments=(), position_embedding=across + down)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        assert facts.position_embedding is not None, "made by `grid_facts`"
        rows = self.row_norm(self.linear(self.pixel_norm(pixels)))
        return self.place_norm(rows + facts.position_embedding)

    def blocks(self, pack: Pack) -> Pieces:
        yield len(pack.rows)
        return self.project(self.norm(pack.rows))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split [N, out] into one [n, out] per image, in the same order."""
        return copy_images(self, embeddings, facts)
