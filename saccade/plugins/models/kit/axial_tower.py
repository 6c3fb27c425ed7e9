"""A vision encoder with 2D RoPE for images of any size, and its merger. Families load the weights.

A token's patches are contiguous, so merging them is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.nn.patches import PatchKernel, copy_images, merged_order
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.shapes import MergedConfig
from saccade.nn.tower import AxialRope, Norm, TowerBlock, run_blocks


class AxialTower:
    """Maps uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`.

    last_norm: the norm after the last block.
    merger: maps rows of patches [N, hidden] to tokens [M, out].
    """

    __slots__ = ("depth", "hidden", "kernel", "last_norm", "layers", "merge", "merger", "rope")
    axes = 2
    longest_segments = (None,)

    def __init__(
        self,
        config: MergedConfig,
        kernel: PatchKernel,
        layers: Sequence[TowerBlock],
        last_norm: Norm | None,
        merger: Callable[[torch.Tensor], torch.Tensor],
        rope: AxialRope,
    ) -> None:
        self.depth, self.hidden, self.merge = config.depth, config.hidden, config.merge
        self.kernel, self.layers, self.rope = kernel, layers, rope
        self.last_norm, self.merger = last_norm, merger

    def rows(self, patches: int) -> int:
        return patches // self.merge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Return the `GridFacts` of a grid, whose last two numbers are the rows and columns of
        patches.
        """
        *_, height, width = grid
        # The row rotates the first half of a head, the column the second.
        places = np.stack(merged_order(height, width, self.merge))  # [2, N]
        return GridFacts(send(places, self.rope.cos.device), ((height * width,),))

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        x = self.kernel(pixels)
        return x if facts.position_embedding is None else x + facts.position_embedding

    def blocks(self, pack: Pack) -> Pieces:
        x = yield from run_blocks(self.layers, pack, self.rope.rotation(pack.places))
        return self.merger(x if self.last_norm is None else self.last_norm(x))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings into one tensor per image. They are already in reading order."""
        return copy_images(self, embeddings, facts)
