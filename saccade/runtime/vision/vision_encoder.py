"""Encodes the images of plans. It reads pixels from the arena, and runs the vision encoder. An
encoding may be split over more than one step.

Ranks divide the work in one of two modes. "weights": each rank has a slice of the vision encoder
and runs it on all images (tensor parallelism). "data": each rank runs the full vision encoder on
some of the images, and the embeddings are gathered (data parallelism). On a single GPU, images are
encoded on a separate stream, so that requests without these images continue.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode
from saccade.core.family import FamilySpec
from saccade.core.plan import Encode
from saccade.core.types import Grid, ImageKey
from saccade.parallel import Shard
from saccade.runtime.vision.packed_encoder import PackedEncoder

if TYPE_CHECKING:  # only for GPUs, and for models that tile images
    from saccade.runtime.vision.streams import SideStream, StreamStopwatch
    from saccade.runtime.vision.tile_assembly import CachedTiles

logger = logging.getLogger("saccade")
NO_TILES: Mapping[ImageKey, CachedTiles] = MappingProxyType({})
MAX_ERROR_CHARS = 300
"""Errors returned to clients are truncated to this many characters."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image's embedding, and the event to wait for before its use, if any."""

    key: ImageKey
    rows: torch.Tensor  # [num_tokens, embedding_width], in separate memory
    ready: torch.cuda.Event | None = None  # after which another stream has computed `rows`


class Stopwatch:
    """Measures the total time of parts of work, each inside `with stopwatch:`."""

    last = None  # no CUDA event

    def __init__(self) -> None:
        self._begun = self._ended = 0.0
        self._seconds = 0.0

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended = time.monotonic()
        self._seconds += self._ended - self._begun

    def done(self) -> bool:
        """Return True if the last part has finished."""
        return True

    def read(self) -> tuple[float, float]:
        """Return the time of all parts in milliseconds, and `time.monotonic()` at the end of the
        last one.
        """
        return 1e3 * self._seconds, self._ended


@dataclass(slots=True, eq=False)
class Encoding:
    """Images that are encoded together, and their progress.

    Costs are in patch-blocks: the number of patches times the vision encoder's blocks. `cost` and
    `spent` are equal on all ranks, so that the encoding ends in the same step on all of them.
    `done` and `following` concern this rank.
    """

    encodes: Sequence[Encode]
    pieces: Generator[int, None, list[torch.Tensor]]
    cost: int  # cost on the rank with the most work
    watch: Stopwatch | StreamStopwatch
    seen: Mapping[ImageKey, CachedTiles]  # tiles of images that are partly cached
    spent: int = 0  # part of `cost` that steps have been assigned
    done: int = 0  # cost of the pieces that were computed
    following: int | None = 0  # cost of the next piece; `None` at the end
    rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """True if no request waits for the encoding."""
        return all(encode.idle for encode in self.encodes)

    def run(self, limit: int | None) -> None:
        """Run the pieces within the first `limit` patch-blocks, or all if `limit` is `None`."""
        while self.following is not None and (limit is None or self.done + self.following <= limit):
            self.done += self.following
            try:
                self.following = next(self.pieces)
            except StopIteration as end:
                self.following, self.rows = None, end.value


class VisionEncoder:
    """Encodes the images of plans on one rank, over as many steps as the plans allow."""

    def __init__(
        self,
        spec: FamilySpec,
        encoder: PackedEncoder,
        arena: Arena,
        like: torch.Tensor,
        shard: Shard,
        mode: EncoderMode,
    ) -> None:
        """Start without images.

        like: an empty tensor [0, width] with the embeddings' dtype and device.
        """
        self._spec = spec
        self._encoder = encoder
        self._arena = arena
        self._like = like
        self._shard = shard
        self._split = shard.size > 1 and mode == "data"
        self._new_watch: type[Stopwatch | StreamStopwatch] = Stopwatch
        self._side_stream: SideStream | None = None
        self._begun: deque[Encoding] = deque()
        self._ended: deque[Encoding] = deque()  # launched completely, and perhaps finished
        self._failed: list[tuple[ImageKey, str]] = []
        if like.is_cuda:
            from saccade.runtime.vision.streams import Pinned, SideStream, StreamStopwatch

            self._new_watch = StreamStopwatch
            self._pinned = Pinned(arena.whole(), like.device)
            # With several ranks, collectives of two streams might run in different orders on each.
            self._side_stream = SideStream(like.device) if shard.size == 1 else None

    def queue_images(
        self, encodes: Sequence[Encode], seen: Mapping[ImageKey, CachedTiles] = NO_TILES
    ) -> None:
        """Queue images for encoding. Images with different adapters are encoded separately.

        Their pixels must not be overwritten until `ended` has reported the images.

        seen: the cached tiles of images with `Encode.copies`.
        """
        if seen and self._side_stream is not None:
            self._side_stream.take([rows for each in seen.values() for rows in each.rows.values()])
        by_adapter: dict[int, list[Encode]] = {}
        for encode in encodes:
            by_adapter.setdefault(encode.adapter, []).append(encode)
        for alike in by_adapter.values():
            self._queue_alike(alike, seen)

    def _queue_alike(self, encodes: Sequence[Encode], seen: Mapping[ImageKey, CachedTiles]) -> None:
        patches = [encode.patches for encode in encodes]
        if self._split:
            parts = split_evenly(patches, self._shard.size)
            most = max(sum(patches[index] for index in part) for part in parts)
            mine = [encodes[index] for index in parts[self._shard.rank]]
            self._add(encodes, mine, most, seen)
            return
        for pack in self._encoder.packs(patches):
            self._add(encodes[pack], encodes[pack], sum(patches[pack]), seen)

    def _add(
        self,
        encodes: Sequence[Encode],
        mine: Sequence[Encode],
        patches: int,
        seen: Mapping[ImageKey, CachedTiles],
    ) -> None:
        pixels = [torch.from_numpy(self._arena.view(encode.pixels)) for encode in mine]
        if self._side_stream is not None:
            pixels = self._side_stream.upload(pixels)
        elif self._like.is_cuda:
            pixels = [each.to(self._like.device, non_blocking=True) for each in pixels]
        if seen:
            from saccade.runtime.vision.tile_assembly import encode_tiles

            pieces = encode_tiles(self._encoder, mine, pixels, seen)
        else:
            grids = [encode.grid for encode in mine]
            pieces = self._encoder.pieces(pixels, grids, encodes[0].adapter)
        self._begun.append(
            Encoding(
                encodes,
                pieces,
                patches * self._encoder.depth,
                self._new_watch(),
                seen,
            )
        )

    def take_over(self, encode: Encode) -> Encoded:
        """Copy an embedding that another server has computed from the arena, and return it.

        The slot in the arena has the embedding instead of pixels. It may be overwritten after the
        call.
        """
        width = self._spec.embedding_width
        nbytes = encode.given * width * self._like.element_size()
        flat = torch.from_numpy(self._arena.whole()[encode.pixels.offset :][:nbytes])
        rows = torch.empty((encode.given, width), dtype=self._like.dtype, device=self._like.device)
        rows.copy_(flat.view(self._like.dtype).view(encode.given, width))
        return Encoded(encode.key, rows)

    def advance(self, tower: int) -> list[Encoded]:
        """Run up to `tower` patch-blocks (as in `Plan.tower`) of the encodings in progress.

        Returns the embeddings that were completed, or on a GPU launched. Up to half of the
        patch-blocks are for the encoding that is closest to its end, so that small images overtake
        large ones. The rest is for encodings in order. Those that no request waits for come last.
        """
        left = max(0, tower) if tower else math.inf
        quick = left / 2
        found: list[Encoded] = []
        while self._begun and left >= 1:
            begun = [each for each in self._begun if not each.idle] or self._begun
            encoding = min(begun, key=lambda each: each.cost - each.spent)
            if quick < 1 or encoding is begun[0]:
                encoding, most = begun[0], left
            else:
                most = quick
            share = int(min(most, left, encoding.cost - encoding.spent))
            encoding.spent += share
            left -= share
            quick -= share
            whole = encoding.spent == encoding.cost
            try:
                with self._side_stream or nullcontext(), encoding.watch:
                    encoding.run(None if whole else encoding.spent)
                    rows = self._gather(encoding) if whole and self._split else encoding.rows
            except Exception as error:
                if self._shard.size > 1 or is_fatal(error, self._like.device):
                    raise  # the other ranks would continue, or the device is unusable
                logger.exception("an image is not encoded")
                self._begun.remove(encoding)
                if len(encoding.encodes) > 1:  # retry one by one, to find the image that fails
                    for encode in encoding.encodes:
                        self._add([encode], [encode], encode.patches, encoding.seen)
                else:
                    self._failed.append((encoding.encodes[0].key, describe_failure(error)))
                continue
            if whole:
                ready = encoding.watch.last if self._side_stream is not None else None
                found += [
                    Encoded(each.key, own, ready) for each, own in zip(encoding.encodes, rows)
                ]
                encoding.rows = []
                self._begun.remove(encoding)
                self._ended.append(encoding)
        return found

    def ended(self, *, wait: bool = False) -> tuple[tuple[ImageKey, float, float], ...]:
        """Return the images whose encoding has finished since the last call.

        Each has its key, the time in milliseconds, and `time.monotonic()` at the end.

        wait: True to wait for an image if one is being computed and none has finished.
        """
        found: list[tuple[ImageKey, float, float]] = []
        while self._ended and (self._ended[0].watch.done() or (wait and not found)):
            encoding = self._ended.popleft()
            found += share_ms(encoding.encodes, *encoding.watch.read())
        return tuple(found)

    def failures(self) -> tuple[tuple[ImageKey, str], ...]:
        """Return the images whose encoding has failed since the last call, as in
        `StepResult.failed`.
        """
        failed, self._failed = tuple(self._failed), []
        return failed

    @property
    def busy(self) -> bool:
        """True if an encoding is in progress, or its result was not reported yet."""
        return bool(self._begun or self._ended or self._failed)

    @property
    def computing(self) -> bool:
        """True if `ended` will report an encoding without another step."""
        return bool(self._ended)

    @property
    def any_ended(self) -> bool:
        """True if `ended` would report an image now."""
        return bool(self._ended) and self._ended[0].watch.done()

    def encode_now(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Encode an image without graphs, and return an embedding that any stream can use.

        pixels: a canvas uint8 [H, W, 3] on the device.
        """
        if self._side_stream is not None:
            self._side_stream.follow()  # the surrounding stream computes the pixels
        with self._side_stream or nullcontext():
            embedding = self._encoder.encode_plainly(pixels, grid)
        if self._side_stream is not None:
            self._side_stream.wait()
        return embedding

    def adapt(self) -> bool:
        """Adapt the graphs to the sizes of recent images. Call it when the worker is idle.

        Returns True if more captures are needed.
        """
        if self._side_stream is not None:
            # An encoding for a disconnected client may still be running and use the same buffers.
            self._side_stream.wait()
            self._side_stream.follow()  # captures use the same buffers
        return self._encoder.adapt()

    def close(self) -> None:
        """Release the graphs. They use collectives, so call this before the ranks disconnect."""
        self._encoder.close()

    def _gather(self, encoding: Encoding) -> list[torch.Tensor]:
        spec, shard, encodes = self._spec, self._shard, encoding.encodes
        patches = [encode.patches for encode in encodes]
        tokens = [spec.num_tokens(encode.grid) for encode in encodes]
        parts = split_evenly(patches, shard.size)
        longest = max(sum(tokens[index] for index in part) for part in parts)
        rows = self._like.new_zeros((longest, spec.embedding_width))
        if mine := encoding.rows:
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


def is_fatal(error: Exception, device: torch.device) -> bool:
    """Return True if the device cannot be trusted to compute correct results after this error."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    # GPU libraries (cuBLAS, cuDNN, Triton) raise RuntimeError.
    return isinstance(error, torch.AcceleratorError) or (
        device.type != "cpu" and isinstance(error, RuntimeError)
    )


def describe_failure(error: Exception) -> str:
    """Return the reason for `StepResult.failed`, which is "" if memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ""
    words = str(error).strip()
    return f"{type(error).__name__}: {words[:MAX_ERROR_CHARS]}" if words else type(error).__name__


def share_ms(
    encodes: Sequence[Encode], ms: float, ended: float
) -> list[tuple[ImageKey, float, float]]:
    """Divide an encoding's time among its images in proportion to their patches.

    Returns (key, milliseconds, end) for each.
    """
    patches = [encode.patches for encode in encodes]
    return [
        (encode.key, ms * count / sum(patches), ended) for encode, count in zip(encodes, patches)
    ]


def split_evenly(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Split `costs` into `parts` groups with about equal sums, and return the indices in each
    group.

    The largest remaining cost is added to the group with the lowest sum (Graham 1969).
    """
    groups: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        groups[least].append(index)
        sums[least] += costs[index]
    return groups
