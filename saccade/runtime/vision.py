"""Pictures to embeddings: reads pixels from the arena, runs the vision tower on all of a step's
pictures in one packed forward.

Ranks share the work in one of two ways. "weights": each runs its slice of the tower on every
picture. "data": each runs the whole tower on its own part of the pictures, and the embeddings are
gathered once. On a GPU that shares nothing, pictures are encoded on a stream beside the language
model's: rows that do not show them do not wait for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode
from saccade.core.family import FamilySpec
from saccade.core.plan import Encode
from saccade.core.types import ImageKey
from saccade.parallel import Shard
from saccade.runtime.encoder import PackedEncoder
from saccade.runtime.streams import Lane, Pinned


@dataclass(frozen=True, slots=True)
class Encoded:
    """Embedding [num_tokens, embedding_width] of a picture, in memory of its own.

    `ready`: when the stream that computes it has done so.
    """

    key: ImageKey
    rows: torch.Tensor
    ready: torch.cuda.Event | None = None


class VisionEncoder:
    """Encodes the pictures that plans name."""

    def __init__(
        self,
        spec: FamilySpec,
        encoder: PackedEncoder,
        arena: Arena,
        like: torch.Tensor,
        shard: Shard,
        mode: EncoderMode,
    ) -> None:
        """`like` has the dtype and the device of embeddings."""
        self._spec = spec
        self._encoder = encoder
        self._arena = arena
        self._like = like
        self._shard = shard
        self._split = shard.size > 1 and mode == "data"
        # Collectives of two streams could meet those of another rank in another order.
        self._lane = Lane(like.device) if like.is_cuda and shard.size == 1 else None
        self._finished: list[tuple[ImageKey, float, float]] = []
        self._running: list[tuple[Sequence[Encode], torch.cuda.Event, torch.cuda.Event]] = []
        self._pinned = Pinned(arena.whole(), like.device) if like.is_cuda else None

    def encode(self, encodes: Sequence[Encode]) -> list[Encoded]:
        """The embedding of each. Its pixels are read before `finish` returns, on every rank."""
        pixels = [
            torch.from_numpy(self._arena.view(encode.pixels)) for encode in encodes
        ]  # uint8 [H, W, 3]
        if self._lane is None:
            return self._encode_here(encodes, pixels)
        there = self._lane.upload(pixels)
        with self._lane as lane:
            begin, end = lane.mark(), torch.cuda.Event(enable_timing=True)
            embeddings = self._encoder.encode(there)
            end.record()
        self._running.append((encodes, begin, end))
        return [Encoded(encode.key, rows, end) for encode, rows in zip(encodes, embeddings)]

    def encode_now(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Embeddings of pictures uint8 [H, W, 3] on the device, for whatever is launched from now
        on.
        """
        if self._lane is None:
            return self._encoder.encode(pixels)
        with self._lane as lane:
            embeddings = self._encoder.encode(pixels)
        lane.wait()
        return embeddings

    def finish(self) -> tuple[tuple[ImageKey, float, float], ...]:
        """Wait until all pixels have been read.

        What has been encoded since the last call, with ms and `time.monotonic()` at its end.
        """
        if self._lane is not None:
            self._lane.wait_uploads()
            while self._running and self._running[0][2].query():
                encodes, begin, end = self._running.pop(0)
                self._finished += share_ms(encodes, begin.elapsed_time(end))
        finished = tuple(self._finished)
        self._finished.clear()
        return finished

    def adapt(self) -> bool:
        """Fit the graphs to the pictures seen; for idle moments. True while there is more to do."""
        if self._lane is not None:
            # what a client that has left asked for may still be running, in the same buffers
            self._lane.wait()
        return self._encoder.adapt()

    def _encode_here(
        self, encodes: Sequence[Encode], pixels: Sequence[torch.Tensor]
    ) -> list[Encoded]:
        """On the stream of everything else."""
        begun = time.perf_counter()
        encode = self._encode_split if self._split else self._encode_whole
        embeddings = encode(encodes, pixels)
        if self._like.is_cuda:
            # The last collective has passed here only when every rank has taken part in it, and so
            # has read its pixels.
            torch.cuda.synchronize()
        self._finished += share_ms(encodes, 1e3 * (time.perf_counter() - begun))
        return [Encoded(encode.key, rows) for encode, rows in zip(encodes, embeddings)]

    def _upload(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.to(self._like.device, non_blocking=True)

    def _encode_whole(
        self, _: Sequence[Encode], pixels: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return self._encoder.encode([self._upload(each) for each in pixels])

    def _encode_split(
        self, encodes: Sequence[Encode], pixels: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        spec, shard = self._spec, self._shard
        tokens = [spec.num_tokens(encode.grid) for encode in encodes]
        parts = split_evenly(tokens, shard.size)
        longest = max(sum(tokens[index] for index in part) for part in parts)
        mine = self._encoder.encode([self._upload(pixels[index]) for index in parts[shard.rank]])
        rows = self._like.new_zeros((longest, spec.embedding_width))
        if mine:
            torch.cat(mine, out=rows[: sum(map(len, mine))])
        everyones = shard.all_gather(rows)  # [size, longest, embedding_width]
        embeddings: list[torch.Tensor] = [rows] * len(encodes)
        for part, gathered in zip(parts, everyones):
            pieces = gathered[: sum(tokens[index] for index in part)].split(
                [tokens[index] for index in part]
            )
            for index, piece in zip(part, pieces):
                embeddings[index] = piece.clone()
        return embeddings


def share_ms(encodes: Sequence[Encode], ms: float) -> list[tuple[ImageKey, float, float]]:
    """What encoding took for each picture of a pack, by patches; it has just ended."""
    patches, now = [math.prod(encode.grid) for encode in encodes], time.monotonic()
    return [(encode.key, ms * count / sum(patches), now) for encode, count in zip(encodes, patches)]


def split_evenly(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `costs` in `parts` groups of about equal sums: the dearest first, each to the
    group that has least (Graham 1969).
    """
    groups: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        groups[least].append(index)
        sums[least] += costs[index]
    return groups
