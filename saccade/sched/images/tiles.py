"""An index from each tile to the images whose embeddings contain it, so that each tile is encoded
only once.

    pixels arrive, with tiles' hashes ──▶ rows in another image's embedding are copied from there
                                      ├──▶ if another image with the tile is being encoded, wait
                                      └──▶ only the other tiles are encoded

The rows of a tile are stored only within the embeddings of the images that contain it, and are
evicted with these. Tiles with different preprocessing settings, or of different tenants (salts),
are different.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from cachetools import LRUCache

from saccade.cache.content import PageKey, TileKey
from saccade.cache.embeddings import EmbeddingCache
from saccade.core.family import CanvasTile, TileLayout
from saccade.core.plan import TileCopy
from saccade.core.types import Grid, Image, ImageKey

MAX_TILES = 1 << 17
"""Maximum number of tile hashes in the index, and of tiles of remembered images."""
MAX_GRIDS = 256
"""Number of grids whose tile layouts are cached."""
MAX_IMAGES_PER_TILE = 4
"""Number of images recorded for each tile, the latest ones."""

TileHash = tuple[bytes, bytes, str]
"""(hash of the tile's pixels, preprocessing settings, salt)."""


class TileHashes(NamedTuple):
    """The grid of an image, and the hashes of its tiles in the order in which they are encoded."""

    grid: Grid
    names: tuple[TileHash, ...] = ()


UNNAMED = TileHashes(())


@dataclass(frozen=True, slots=True)
class TilesFound:
    """Which tiles of an image can be copied, and how many patches are left to encode."""

    copies: tuple[TileCopy, ...]  # tiles whose rows are in memory
    patches: int  # patches of the other tiles, to encode
    awaits: ImageKey | None  # an image that is being encoded and has some of the other tiles


class TileIndex:
    """Finds, for the hash of a tile, the images whose embeddings contain it."""

    def __init__(
        self, layout: TileLayout, patches: Callable[[Grid], int], embeddings: EmbeddingCache
    ) -> None:
        """Create an empty index.

        patches: as `FamilySpec.num_patches`.
        """
        self._tiles = lru_cache(MAX_GRIDS)(layout.tiles)
        self._starts = lru_cache(MAX_GRIDS)(lambda grid: row_starts(layout.tiles(grid)))
        self._patches = patches
        self._embeddings = embeddings
        self._names: LRUCache[ImageKey, TileHashes] = LRUCache(
            MAX_TILES, getsizeof=lambda tiles: len(tiles.names)
        )
        self._images_by_tile: LRUCache[TileHash, dict[ImageKey, tuple[Grid, int]]] = LRUCache(
            MAX_TILES
        )
        self._encoding: dict[TileHash, ImageKey] = {}

    def arrived(self, image: Image, digests: Collection[bytes]) -> None:
        """Record the hashes of an image's tiles, after its pixels have arrived."""
        key = image.key
        names = tuple((digest, key.settings, key.salt) for digest in digests)
        self._names[key] = TileHashes(image.grid, names)

    def find(self, image: Image, away: Collection[ImageKey]) -> TilesFound | None:
        """Return which of an image's tiles can be copied, or None if the hashes of its tiles are
        unknown.

        away: images whose embeddings the workers do not have yet when the planned step starts.
        """
        known = self._names.get(image.key)
        if known is None:
            return None
        copies, patches, awaits = [], 0, None
        first: dict[TileHash, int] = {}
        for index, (name, tile) in enumerate(zip(known.names, self._tiles(image.grid))):
            if (copy := self._find_copy(name, index, away)) is not None:
                copies.append(copy)
            elif name in first:
                copies.append(TileCopy(index, image.key, image.grid, first[name]))
            else:
                first[name] = index
                patches += self._patches(tile.grid)
                awaits = self._encoding.get(name, awaits)
        return TilesFound(tuple(copies), patches, awaits)

    def _find_copy(self, name: TileHash, index: int, away: Collection[ImageKey]) -> TileCopy | None:
        homes = self._images_by_tile.get(name, {})
        for key, (grid, place) in [*homes.items()][::-1]:
            tier = self._embeddings.locate(key)
            if tier in ("device", "host") and key not in away:
                return TileCopy(index, key, grid, place)
            if tier is None:
                del homes[key]
        return None

    def begin(self, image: Image, copies: Collection[TileCopy]) -> tuple[bool, ...]:
        """Record that an image is being encoded, except for the tiles that `copies` covers.

        Returns for each tile whether it is encoded. The result is empty if the hashes are unknown.
        """
        names = self._names.get(image.key, UNNAMED).names
        seen = {copy.tile for copy in copies}
        for index, name in enumerate(names):
            if index not in seen:
                self._encoding[name] = image.key
        return tuple(index not in seen for index in range(len(names)))

    def ended(self, image: Image, *, whole: bool) -> None:
        """Record that the encoding of an image has ended.

        whole: True if it succeeded.
        """
        key = image.key
        for name in [name for name, other in self._encoding.items() if other == key]:
            del self._encoding[name]
        for index, name in enumerate(self._names.get(key, UNNAMED).names if whole else ()):
            homes = self._images_by_tile.setdefault(name, {})
            homes.pop(key, None)
            homes[key] = image.grid, index
            if len(homes) > MAX_IMAGES_PER_TILE:
                del homes[next(iter(homes))]

    def by_tiles(self, key: PageKey) -> TileKey | None:
        """Return a page's key with tiles instead of images, so that equal pages of different images
        have equal keys.

        Returns None if an image's tiles are unknown or not contiguous. Pages with equal results
        have equal embedding rows at equal positions.
        """
        tokens, shown = key
        pieces = []
        for position, length, image, row, time in shown:
            known = self._names.get(image)
            starts = None if known is None else self._starts(known.grid)
            if known is None or starts is None:
                return None
            end, tile = row + length, bisect_right(starts, row) - 1
            while row < end:
                count = min(end, starts[tile + 1]) - row
                pieces.append((position, count, known.names[tile], row - starts[tile], time))
                position, row, tile = position + count, row + count, tile + 1
        return tokens, tuple(pieces)

    def forget(self) -> None:
        """Clear the index because the embeddings were flushed."""
        self._names.clear()
        self._images_by_tile.clear()
        self._encoding.clear()


def row_starts(tiles: Sequence[CanvasTile]) -> tuple[int, ...] | None:
    """Return the first embedding row of each tile, followed by the end of the last tile's rows.

    Returns None unless the rows of each tile are contiguous, and follow those of the tile before.
    """
    runs = [run for tile in tiles for run in tile.rows]
    if len(runs) > len(tiles) or any(one.stop != next.start for one, next in pairwise(runs)):
        return None
    return (*(run.start for run in runs), runs[-1].stop) if runs else None
