"""Encodes images to embeddings on one device. Images of different sizes are packed into one forward
pass of the vision encoder, which replays a CUDA graph if one fits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from saccade.core.config import EncoderConfig
from saccade.core.types import Grid
from saccade.kernels.device import send
from saccade.kernels.reference.segments import Segments
from saccade.nn.protocol import Cut, GridFacts, Pack, TowerNet
from saccade.runtime.vision.positions import PositionCache

if TYPE_CHECKING:
    from saccade.runtime.graphs import PackGraphs

T = TypeVar("T")

CPU_PACK = 1024
"""Maximum patches of one packed forward pass on a CPU, unless a single image has more. Larger packs
do not fit in the CPU's caches. A GPU encodes all images in one pass.
"""
CPU_CHUNK_ROWS = 1024
"""On a CPU, a block of the vision encoder computes a long segment in chunks of at least this many
rows, so that a step can end between two chunks. With fewer than 768 queries, torch's attention uses
smaller tiles, which are slower (decision 045).
"""
WARM_SIDES = (16, 256)
"""The side lengths in pixels of the images for the warm-up. For families that support small images,
one has fewer patches than the kernels' smallest tile has rows, and the other has more.
"""


class PackedEncoder:
    """Runs the vision encoder of `net` on images of different sizes at once.

    like: an empty tensor [0, width] with the embeddings' dtype and device.
    """

    def __init__(
        self,
        net: TowerNet,
        positions: PositionCache,
        config: EncoderConfig,
        like: torch.Tensor,
        graphs: PackGraphs | None = None,
    ) -> None:
        self._spec = net.spec
        self._vision = net.vision
        self._adapters = net.adapters
        self._positions = positions
        self._attention = net.ops.towers[config.attention]
        self._device = like.device
        self._pack = None if like.is_cuda else CPU_PACK
        self._piece = None if like.is_cuda else CPU_CHUNK_ROWS
        self._graphs = graphs

    @torch.inference_mode()
    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Encode images, and return an embedding [num_tokens, embedding_width] for each.

        Each embedding is in separate memory.

        pixels: canvases uint8 [H, W, 3] on the device.
        """
        return drain(self.pieces(pixels, grids))

    def pieces(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid], adapter: int = 0
    ) -> Generator[int, None, list[torch.Tensor]]:
        """Encode images as `encode` does, piece by piece.

        Yields the cost of the next piece in patch-blocks (patches times blocks), and computes that
        piece when resumed. The generator returns the embeddings. Results do not depend on when it
        is resumed.

        adapter: the index of the vision encoder's adapter, or 0.
        """
        if not adapter:
            return (yield from self._pieces(pixels, grids, plain=False))
        pieces = self._pieces(pixels, grids, plain=True)
        while True:
            try:
                with self._adapters.tower.all(adapter):  # per piece, since encodings can interleave
                    cost = next(pieces)
            except StopIteration as end:
                found: list[torch.Tensor] = end.value
                return found
            yield cost

    def _pieces(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid], *, plain: bool
    ) -> Generator[int, None, list[torch.Tensor]]:
        facts = [self._positions.facts(grid) for grid in grids]
        embeddings: list[torch.Tensor] = []
        for pack in self.packs([fact.num_patches for fact in facts]):
            embeddings += yield from self._forward(pixels[pack], facts[pack], plain)
        return embeddings

    def split(self, rows: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return an image's embedding, in separate memory, from the concatenated rows of its
        tiles.
        """
        return self._vision.split(rows, [self._positions.facts(grid)])[0]

    @property
    def depth(self) -> int:
        """The number of blocks of the vision encoder."""
        return self._vision.depth

    def packs(self, patches: Sequence[int]) -> list[slice]:
        """Return which consecutive images are encoded together, given their numbers of patches."""
        return packs(patches, self._pack)

    @property
    def captures(self) -> bool:
        """True if graphs may have been captured. Graphs contain the addresses of weights."""
        return self._graphs is not None

    def replace(self, net: TowerNet) -> None:
        """Use another vision encoder of the same shape. No encoding may be in progress."""
        assert not self.captures
        self._vision, self._adapters = net.vision, net.adapters
        self._positions.replace(net.vision)

    @torch.inference_mode()
    def adapt(self) -> bool:
        """Adapt the graphs to the sizes of recent images. Call it when the worker is idle.

        Returns True if more captures are needed.
        """
        return self._graphs is not None and self._graphs.adapt()

    @torch.inference_mode()
    def encode_plainly(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Encode one image without graphs, so that the result does not depend on the sizes of
        graphs.

        pixels: a canvas uint8 [H, W, 3] on the device.
        """
        facts = self._vision.grid_facts(grid)
        rows = self._vision.embed(pixels, facts)
        embedding = drain(self._vision.blocks(self._eager_pack([rows], [facts])))
        return self._vision.split(embedding, [facts])[0]

    def warm_up(self, adapter: int = 0) -> None:
        """Encode two blank images without graphs, to compile the kernels for long and short
        segments.

        Does nothing if the model has no vision encoder.

        adapter: as in `pieces`.
        """
        if not self._spec.sees_images:
            return
        bounds = self._spec.pixel_bounds
        bounds = replace(bounds, min_pixels=bounds.least)
        recipes = [self._spec.recipe(side, side, bounds) for side in WARM_SIDES]
        # Families with one image size need only one image.
        for recipe in {(each.grid, each.canvas): each for each in recipes}.values():
            canvas = torch.zeros((*recipe.canvas, 3), dtype=torch.uint8, device=self._device)
            with self._adapters.tower.all(adapter):
                self.encode_plainly(canvas, recipe.grid)

    def close(self) -> None:
        """Release the graphs."""
        self._graphs = None

    def _forward(
        self, pixels: Sequence[torch.Tensor], facts: Sequence[GridFacts], plain: bool
    ) -> Generator[int, None, list[torch.Tensor]]:
        rows = [self._vision.embed(image, fact) for image, fact in zip(pixels, facts)]
        if self._graphs is not None and not plain:
            size = sum(map(len, rows))
            if size <= self._graphs.largest:
                yield size * self._vision.depth
            replayed = self._graphs.run(rows, facts)
            if replayed is not None:
                return self._vision.split(replayed, facts)
        output = yield from self._vision.blocks(self._eager_pack(rows, facts))
        return self._vision.split(output, facts)

    def _eager_pack(self, rows: Sequence[torch.Tensor], facts: Sequence[GridFacts]) -> Pack:
        alone = len(rows) == 1
        cuts = []
        for kind in zip(*(fact.segments for fact in facts)):
            lengths = [length for each in kind for length in each]
            cuts.append(split_segments(lengths, self._piece, self._device))
        return Pack(
            rows=rows[0] if alone else torch.cat(list(rows)),
            places=facts[0].places if alone else torch.cat([fact.places for fact in facts], dim=1),
            cuts=tuple(cuts),
            attention=self._attention,
        )


def split_segments(
    lengths: Sequence[int], limit: int | None, device: torch.device
) -> tuple[Cut, ...]:
    """Divide consecutive segments into cuts, which attention computes one after another.

    Short segments are grouped into cuts of up to `limit` rows. Longer segments are split evenly
    into cuts of at least `limit` rows. If `limit` is None, all segments are in one cut.
    """

    def segments(each: Sequence[int]) -> Segments:
        bounds = np.array(list(accumulate(each, initial=0)), np.int32)
        return Segments(send(bounds, device), max(each))

    cuts: list[Cut] = []
    start = 0
    for group in packs(lengths, limit) if limit else [slice(0, len(lengths))]:
        each = [length for length in lengths[group] if length]
        end = start + sum(each)
        whole = slice(start, end)
        if limit and sum(each) > limit:  # a single long segment
            size = -(-(end - start) // ((end - start) // limit))
            for first in range(start, end, size):
                rows = slice(first, min(first + size, end))
                cuts.append(Cut(rows, whole, segments([rows.stop - rows.start])))
        elif each:
            cuts.append(Cut(whole, whole, segments(each)))
        start = end
    return tuple(cuts)


def drain(pieces: Generator[int, None, T]) -> T:
    """Compute all pieces, and return the generator's result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: T = end.value
            return found


def packs(patches: Sequence[int], limit: int | None) -> list[slice]:
    """Group consecutive images so that each group has at most `limit` patches or a single image."""
    cuts = [0]
    total = 0
    for i, count in enumerate(patches):
        if limit is not None and total and total + count > limit:
            cuts.append(i)
            total = 0
        total += count
    return [slice(start, end) for start, end in pairwise([*cuts, len(patches)])] if patches else []
