"""Assembles an image's embedding from the rows of its tiles. Rows of cached tiles are copied from
other images' embeddings. The other tiles are encoded, each as a separate image.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from saccade.core.family import CanvasTile, FamilySpec, TileLayout
from saccade.core.plan import Encode
from saccade.core.types import ImageKey
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.vision.packed_encoder import PackedEncoder


@dataclass(frozen=True, slots=True)
class CachedTiles:
    """The tiles of an image, and the rows of those that need not be encoded."""

    tiles: tuple[CanvasTile, ...]
    rows: Mapping[int, torch.Tensor]  # by tile index, the rows copied from another image
    same: Mapping[int, int]  # by tile index, the index of an identical tile of this image

    @property
    def new(self) -> list[CanvasTile]:
        """The tiles that must be encoded."""
        seen = self.rows.keys() | self.same.keys()
        return [tile for number, tile in enumerate(self.tiles) if number not in seen]

    def together(self, new: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return the rows of all tiles, concatenated in order.

        new: yields the rows of the tiles that were encoded, in order.
        """
        parts: list[torch.Tensor] = []
        for number in range(len(self.tiles)):
            if number in self.same:
                parts.append(parts[self.same[number]])
            else:
                found = self.rows.get(number)
                parts.append(next(new) if found is None else found)
        return torch.cat(parts)


class TileReader:
    """Copies the rows of cached tiles from embeddings, before the plan moves these embeddings."""

    def __init__(self, spec: FamilySpec, layout: TileLayout, embeddings: EmbeddingMemory) -> None:
        self._spec = spec
        self._layout = layout
        self._embeddings = embeddings

    def read(self, encodes: Sequence[Encode]) -> Mapping[ImageKey, CachedTiles]:
        """Return the cached tiles by image key, for the images that have any."""
        return {encode.key: self._read(encode) for encode in encodes if encode.copies}

    def _read(self, encode: Encode) -> CachedTiles:
        others = {copy.key: copy.grid for copy in encode.copies if copy.key != encode.key}
        sources = {
            key: (self._embeddings.read(key, self._spec.num_tokens(grid)), self._layout.tiles(grid))
            for key, grid in others.items()
        }
        rows, same = {}, {}
        for copy in encode.copies:
            if copy.key == encode.key:
                same[copy.tile] = copy.place
            else:
                embedding, tiles = sources[copy.key]
                runs = tiles[copy.place].rows
                rows[copy.tile] = torch.cat([embedding[run.start : run.stop] for run in runs])
        return CachedTiles(self._layout.tiles(encode.grid), rows, same)


def encode_tiles(
    encoder: PackedEncoder,
    encodes: Sequence[Encode],
    pixels: Sequence[torch.Tensor],
    seen: Mapping[ImageKey, CachedTiles],
) -> Generator[int, None, list[torch.Tensor]]:
    """Encode images as `PackedEncoder.pieces` does, but copy the rows of cached tiles.

    seen: the cached tiles of each image that has any.
    """
    parts, grids = [], []
    for encode, canvas in zip(encodes, pixels):
        if (held := seen.get(encode.key)) is None:
            parts.append(canvas)
            grids.append(encode.grid)
        else:
            parts += [canvas[tile.window.slices].contiguous() for tile in held.new]
            grids += [tile.grid for tile in held.new]
    adapter = encodes[0].adapter if encodes else 0
    rows, found = iter((yield from encoder.pieces(parts, grids, adapter))), []
    for encode in encodes:
        held = seen.get(encode.key)
        found.append(
            next(rows) if held is None else encoder.split(held.together(rows), encode.grid)
        )
    return found
