"""Vision encoders for tiles of any number of images in one pack. Each tile is a separate segment.

A family defines how pixels become rows, and how rows become tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.core.types import Grid
from saccade.nn.patches import copy_images
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.shapes import TileConfig
from saccade.nn.tower import TowerBlock, run_blocks


class TileTower:
    """Maps uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`.

    A family derives from it and adds `grid_facts`, `embed` and `to_tokens`. Learned positions are
    added before the first block, so `GridFacts.places` has no axes.
    """

    __slots__ = ("config", "depth", "device", "hidden", "layers", "longest_segments")

    axes = 0

    def __init__(
        self, config: TileConfig, device: torch.device, layers: Sequence[TowerBlock]
    ) -> None:
        self.config, self.device, self.layers = config, device, layers
        self.hidden, self.depth = config.hidden, config.depth
        self.longest_segments = (config.rows,)

    def rows(self, patches: int) -> int:
        return patches // self.config.rows * self.config.tokens

    def tile_facts(self, tiles: int) -> GridFacts:
        """Return the `GridFacts` of an image with this number of tiles."""
        rows = self.config.rows
        places = torch.zeros((0, tiles * rows), dtype=torch.int64).to(self.device)
        return GridFacts(places, segments=((rows,) * tiles,))

    def grid_facts(self, grid: Grid) -> GridFacts:
        raise NotImplementedError

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        raise NotImplementedError

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Map the last block's rows [tiles * rows, hidden] to embeddings."""
        raise NotImplementedError

    def blocks(self, pack: Pack) -> Pieces:
        return self.to_tokens((yield from run_blocks(self.layers, pack)))

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the embeddings into one tensor per image. The tiles of an image are contiguous."""
        return copy_images(self, embeddings, facts)
