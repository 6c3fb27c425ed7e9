"""DeepSeek-VL2's SigLIP and projector, and the order of an image's tokens.

The whole image comes first, then a learned separator, then the tiles, in lines of tokens that span
the whole grid. Each line ends in a learned newline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from saccade.core.types import Grid
from saccade.nn.linear import Column, Linear
from saccade.nn.patches import split_images
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.nn.shapes import SiglipConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.models.deepseek_vl2.images import ALONE, CandidateRules
from saccade.plugins.models.kit.siglip import SiglipTower

PROJECTOR = "projector.layers"


class PaddedProjector:
    """Projects merge x merge patches to one token of the language model.

    Zeros pad the patches at the right and the bottom. Every rank has the whole projector.
    """

    __slots__ = ("across", "down", "merge", "up")

    def __init__(self, weights: Weights, config: SiglipConfig) -> None:
        self.across, self.merge = config.across, config.merge
        inputs, out = config.hidden * config.merge**2, config.out_hidden
        first, last = (Column(f"{PROJECTOR}.{each}", out, UNSHARDED) for each in (0, 2))
        # The files order inputs by channel, then by patch. Here they are ordered by patch first.
        part = first.part("weight", inputs)
        matrix = weights.load(part).view(out, config.hidden, -1).transpose(1, 2).reshape(out, -1)
        self.up = Linear(
            weights.ops,
            weights.matrix(matrix.contiguous(), part.name),
            weights.load(first.part("bias")),
            "gelu",
        )
        self.down = Linear.columns(weights, [last], out, bias=True)

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Map [tiles * patches, 1, hidden] to [tiles * tokens, out]."""
        across, merge = self.across, self.merge
        more = -across % merge
        whole = F.pad(patches.view(-1, across, across, patches.shape[-1]), (0, 0, 0, more, 0, more))
        cut = whole.unflatten(2, (-1, merge)).unflatten(1, (-1, merge))  # [n, E, m, E, m, hidden]
        tokens = cut.transpose(2, 3).flatten(3).flatten(0, 2)
        return self.down(self.up(tokens))


class DeepseekTower:
    """Encodes uint8 pixels to embeddings. Implements `nn.protocol.VisionNet`."""

    __slots__ = (
        "config",
        "depth",
        "edge",
        "hidden",
        "longest_segments",
        "marks",
        "tower",
    )

    axes = 0

    def __init__(
        self, weights: Weights, config: SiglipConfig, rules: CandidateRules, shard: Shard
    ) -> None:
        self.config = config
        self.edge = -(-config.across // config.merge)
        alone = replace(config, merge=1)  # a tile's patches are in raster order
        order = torch.arange(config.patches)
        projector = PaddedProjector(weights, config)
        self.tower = tower = SiglipTower(weights, alone, rules.colours, order, projector, shard)
        self.hidden, self.depth = tower.hidden, tower.depth
        self.longest_segments = tower.longest_segments
        names = ("image_newline", "view_seperator")
        parts = [weights.load(Part(name, (config.out_hidden,))) for name in names]
        self.marks = torch.stack(parts)  # [2, out]

    def rows(self, patches: int) -> int:
        return patches // self.config.patches * self.edge**2

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Return the grid's `GridFacts`.

        `restore` maps each token to its row: a tile's token, the newline or the separator. The
        tokens of a single tile stay in order.
        """
        if grid == ALONE:
            return self.tower.grid_facts(grid)
        order = torch.from_numpy(lines(grid, self.edge)).to(self.tower.device)
        return replace(self.tower.grid_facts(grid), restore=order)

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        """Map pixels, uint8 [H, W, 3], to rows [N, hidden].

        The canvas has the grid of tiles, and below it the whole image with empty space to its
        right.
        """
        return self.tower.embed(pixels, facts)

    def blocks(self, pack: Pack) -> Pieces:
        return self.tower.blocks(pack)

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the tiles' embeddings [M, out] into one [m, out] per image, and insert newlines and
        the separator.
        """
        found = []
        for fact, part in zip(facts, split_images(self, embeddings, facts)):
            if fact.restore is None:
                found.append(part.clone())
            else:
                found.append(torch.cat((part, self.marks)).index_select(0, fact.restore))
        return found


def lines(grid: Grid, edge: int) -> npt.NDArray[np.int64]:
    """Return the source row of each image token.

    The source has edge x edge tokens per tile, then the tokens of the whole image, a newline and a
    separator.
    """
    rows, columns = grid
    count = rows * columns * edge**2
    newline, separator = count + edge**2, count + edge**2 + 1
    places = np.arange(count).reshape(rows, columns, edge, edge).transpose(0, 2, 1, 3)
    overall = np.arange(count, newline).reshape(edge, edge)

    def ended(table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.pad(table, ((0, 0), (0, 1)), constant_values=newline).reshape(-1)

    tiles = places.reshape(rows * edge, columns * edge)
    return np.concatenate((ended(overall), [separator], ended(tiles)))
