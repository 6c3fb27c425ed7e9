"""Pictures to embeddings: reads pixels from the arena, runs the vision tower on all of a step's pictures in one packed forward.

Ranks share the work in one of two ways. "weights": each runs its slice of the tower on every picture. "data": each runs the whole tower
on its own part of the pictures, and the embeddings are gathered once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode
from saccade.core.family import FamilySpec
from saccade.core.plan import Encode
from saccade.core.types import ImageKey
from saccade.parallel import Shard
from saccade.runtime.encoder import PackedEncoder


class VisionEncoder:
    """Encodes the pictures that plans name."""

    def __init__(self, spec: FamilySpec, encoder: PackedEncoder, arena: Arena, like: torch.Tensor, shard: Shard, mode: EncoderMode) -> None:
        """`like` has the dtype and the device of embeddings."""
        self._spec = spec
        self._encoder = encoder
        self._arena = arena
        self._like = like
        self._shard = shard
        self._split = shard.size > 1 and mode == "data"

    def encode(self, encodes: Sequence[Encode]) -> Iterable[tuple[ImageKey, torch.Tensor]]:
        """(key, embedding [num_tokens, embedding_width]) of each. No rank reads the arena slots any more when this has returned."""
        embeddings = self._encode_split(encodes) if self._split else self._encoder.encode([self._pixels(encode) for encode in encodes])
        if self._shard.size > 1 and self._like.device.type == "cuda":
            # The last collective has passed here only when every rank has taken part in it, and so has read its pixels.
            torch.cuda.synchronize()
        return zip((encode.key for encode in encodes), embeddings)

    def _pixels(self, encode: Encode) -> torch.Tensor:
        return torch.from_numpy(self._arena.view(encode.pixels)).to(self._like.device)  # uint8 [H, W, 3]

    def _encode_split(self, encodes: Sequence[Encode]) -> list[torch.Tensor]:
        spec, shard = self._spec, self._shard
        tokens = [spec.num_tokens(encode.grid) for encode in encodes]
        parts = split_evenly(tokens, shard.size)
        longest = max(sum(tokens[index] for index in part) for part in parts)
        mine = self._encoder.encode([self._pixels(encodes[index]) for index in parts[shard.rank]])
        rows = self._like.new_zeros((longest, spec.embedding_width))
        if mine:
            torch.cat(mine, out=rows[: sum(map(len, mine))])
        everyones = shard.all_gather(rows)  # [size, longest, embedding_width]
        embeddings: list[torch.Tensor] = [rows] * len(encodes)
        for part, gathered in zip(parts, everyones):
            pieces = gathered[: sum(tokens[index] for index in part)].split([tokens[index] for index in part])
            for index, piece in zip(part, pieces):
                embeddings[index] = piece.clone()
        return embeddings


def split_evenly(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `costs` in `parts` groups of about equal sums: the dearest first, each to the group that has least (Graham 1969)."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        groups[least].append(index)
        sums[least] += costs[index]
    return groups
