"""Images to embeddings: reads pixels from the arena, and runs the vision encoder, a part in each
step if the plan splits it.

Owns the encodings in progress. Ranks share the work in one of two ways. "weights": each runs its
slice of the tower on every image. "data": each runs the whole tower on its own part of the images,
and the embeddings are gathered once. On an unshared GPU, images are encoded on a stream next to the
language model's, so that rows without these images continue.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode
from saccade.core.family import FamilySpec
from saccade.core.plan import Encode
from saccade.core.types import Grid, ImageKey
from saccade.parallel import Shard
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.streams import Pinned, SideStream, Stopwatch

if TYPE_CHECKING:  # for towers that see tiles apart
    from saccade.runtime.vision.tile_assembly import CachedTiles

logger = logging.getLogger("saccade")
NO_TILES: Mapping[ImageKey, CachedTiles] = MappingProxyType({})
MAX_ERROR_CHARS = 300
"""Characters of an error's text that its request is told."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image's embedding [num_tokens, embedding_width], in own memory.

    `ready`: when the computing stream has finished.
    """

    key: ImageKey
    rows: torch.Tensor
    ready: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class Encoding:
    """Images encoded together, and their progress.

    cost: patch-blocks on the rank with most to do. The spent part decides, on every rank alike, in
    which step the encoding ends. `done` and `following` are this rank's own pieces: done so far,
    and the next one, or `None` at the end. `seen`: the tiles of images that copy some.
    """

    encodes: Sequence[Encode]
    pieces: Generator[int, None, list[torch.Tensor]]
    cost: int
    watch: Stopwatch
    seen: Mapping[ImageKey, CachedTiles]
    spent: int = 0
    done: int = 0
    following: int | None = 0
    rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Return True if no request waits for the encoding."""
        return all(encode.idle for encode in self.encodes)

    def run(self, limit: int | None) -> None:
        """Run the pieces within the first `limit` patch-blocks, or all without a limit."""
        while self.following is not None and (limit is None or self.done + self.following <= limit):
            self.done += self.following
            try:
                self.following = next(self.pieces)
            except StopIteration as end:
                self.following, self.rows = None, end.value


class VisionEncoder:
    """Encodes the images named by plans."""

    def __init__(
        self,
        spec: FamilySpec,
        encoder: PackedEncoder,
        arena: Arena,
        like: torch.Tensor,
        shard: Shard,
        mode: EncoderMode,
    ) -> None:
        """Take dtype and device from `like`, a tensor of embeddings."""
        self._spec = spec
        self._encoder = encoder
        self._arena = arena
        self._like = like
        self._shard = shard
        self._split = shard.size > 1 and mode == "data"
        # Collectives of two streams could meet those of another rank in another order.
        self._side_stream = SideStream(like.device) if like.is_cuda and shard.size == 1 else None
        self._begun: deque[Encoding] = deque()
        self._ended: deque[Encoding] = deque()  # computed, or at least all launched
        self._failed: list[tuple[ImageKey, str]] = []
        self._pinned = Pinned(arena.whole(), like.device) if like.is_cuda else None

    def queue_images(
        self, encodes: Sequence[Encode], seen: Mapping[ImageKey, CachedTiles] = NO_TILES
    ) -> None:
        """Queue images behind earlier ones. Images with different adapters are encoded apart.

        Their pixels stay in place until `ended` has named the images. seen: of images with
        `Encode.copies`.
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
                Stopwatch(on_device=self._like.is_cuda),
                seen,
            )
        )

    def take_over(self, encode: Encode) -> Encoded:
        """Copy another server's embedding from the arena, where it is stored instead of pixels.

        The arena may be overwritten after the call.
        """
        width = self._spec.embedding_width
        nbytes = encode.given * width * self._like.element_size()
        flat = torch.from_numpy(self._arena.whole()[encode.pixels.offset :][:nbytes])
        rows = torch.empty((encode.given, width), dtype=self._like.dtype, device=self._like.device)
        rows.copy_(flat.view(self._like.dtype).view(encode.given, width))
        return Encoded(encode.key, rows)

    def advance(self, tower: int) -> list[Encoded]:
        """Spend `tower` patch-blocks (as `Plan.tower`) on encodings in progress.

        Up to half is spent on the one nearest to its end, so that small images pass large ones. The
        rest is spent in order, unawaited encodings last. Returns the embeddings that are now
        computed, or being computed.
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
                    raise  # other ranks continue, or the device is unusable
                logger.exception("an image is not encoded")
                self._begun.remove(encoding)
                if len(encoding.encodes) > 1:  # which of them is to blame is not known
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
        """Return the images that have ended since the last call, with ms and `time.monotonic()` at
        the end.

        wait: wait for an image, if any is being computed.
        """
        found: list[tuple[ImageKey, float, float]] = []
        while self._ended and (self._ended[0].watch.done() or (wait and not found)):
            encoding = self._ended.popleft()
            found += share_ms(encoding.encodes, *encoding.watch.read())
        return tuple(found)

    def failures(self) -> tuple[tuple[ImageKey, str], ...]:
        """Return the images that failed since the last call, as in `StepResult.failed`."""
        failed, self._failed = tuple(self._failed), []
        return failed

    @property
    def busy(self) -> bool:
        """Return True while some encoding is in progress, or has an unreported end."""
        return bool(self._begun or self._ended or self._failed)

    @property
    def computing(self) -> bool:
        """Return True while `ended` will report an encoding without another step."""
        return bool(self._ended)

    @property
    def any_ended(self) -> bool:
        """Return True if `ended` has something to report."""
        return bool(self._ended) and self._ended[0].watch.done()

    def encode_now(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Encode an image, given as a canvas uint8 [H, W, 3] on the device, without graphs.

        All later launches may use the embedding.
        """
        if self._side_stream is not None:
            self._side_stream.follow()  # the pixels are the surrounding stream's
        with self._side_stream or nullcontext():
            embedding = self._encoder.encode_plainly(pixels, grid)
        if self._side_stream is not None:
            self._side_stream.wait()
        return embedding

    def adapt(self) -> bool:
        """Fit the graphs to the images seen. Call it in idle moments. Returns True while more is to
        do.
        """
        if self._side_stream is not None:
            # what a client that has left asked for may still be running, in the same buffers
            self._side_stream.wait()
            self._side_stream.follow()  # captures run in the same buffers
        return self._encoder.adapt()

    def close(self) -> None:
        """Release the graphs, which hold on to collectives."""
        self._encoder.close()

    def _gather(self, encoding: Encoding) -> list[torch.Tensor]:
        """Gather every rank's embeddings, in the order of the encodes."""
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
    """Return True if results computed on the device after this error are untrustworthy."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    # libraries of a GPU (cuBLAS, cuDNN, Triton) raise plain RuntimeError
    return isinstance(error, torch.AcceleratorError) or (
        device.type != "cpu" and isinstance(error, RuntimeError)
    )


def describe_failure(error: Exception) -> str:
    """Return the reason as `StepResult.failed` has it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ""
    words = str(error).strip()
    return f"{type(error).__name__}: {words[:MAX_ERROR_CHARS]}" if words else type(error).__name__


def share_ms(
    encodes: Sequence[Encode], ms: float, ended: float
) -> list[tuple[ImageKey, float, float]]:
    """Share an encoding's time among its images by patches. Returns (key, ms, end) for each."""
    patches = [encode.patches for encode in encodes]
    return [
        (encode.key, ms * count / sum(patches), ended) for encode, count in zip(encodes, patches)
    ]


def split_evenly(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Split `costs` into `parts` groups with about equal sums. Returns indices.

    Longest first, each to the least loaded group (Graham 1969).
    """
    groups: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        groups[least].append(index)
        sums[least] += costs[index]
    return groups
