"""Runs a family's network on one sequence the way the runtime would: pages in any order, chunks,
splices, one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from saccade.core.config import EncoderConfig
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.types import Image, ImageKey
from saccade.families.registry import load_spec
from saccade.kernels.reference.ops import Ops
from saccade.nn.protocol import Batch, FamilyNet
from saccade.runtime.attention import attention_for
from saccade.runtime.memory import allocate_caches, keys_and_values
from saccade.runtime.states import StateMemory
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.lab.qwen import grids
from tests.fixtures.tiny import Reference, picture

CPU = torch.device("cpu")
LOGITS: dict[str, Any] = {"atol": 3e-4, "rtol": 0.0}
SIZES = [(150, 97), (200, 333), (64, 64)]  # one to be enlarged, odd shapes, partial windows


def prompt(reference: Reference, pictures: int) -> list[int]:
    """Return text before, between and after `pictures` placeholders."""
    tokenizer = Tokenizer.from_file(str(reference.folder / "tokenizer.json"))
    tokens = [11, 12, 13]
    for number in range(pictures):
        tokens += [*tokenizer.encode(reference.placeholder).ids, 20 + number]
    return [*tokens, 30, 31, 32, 33]


def pixels(reference: Reference, count: int) -> list[np.ndarray]:
    return [
        reference.resize(picture(*size, seed=number)) for number, size in enumerate(SIZES[:count])
    ]


def load(folder: Path, ops: Ops | None = None) -> FamilyNet:
    return load_net(load_spec(folder), folder, dtype=torch.float32, device=CPU, ops=ops)


def images_of(spec: FamilySpec, pixels: Sequence[np.ndarray]) -> list[Image]:
    return [
        Image(
            ImageKey(bytes([i]), b""),
            grid,
            spec.num_tokens(grid),
            spec.num_patches(grid),
            (pixels[i].shape[0], pixels[i].shape[1]),
        )
        for i, grid in enumerate(grids(spec, pixels))
    ]


def encode(
    net: FamilyNet, pixels: Sequence[torch.Tensor], metrics: Metrics | None = None
) -> list[torch.Tensor]:
    """Embeddings of pictures, packed."""
    positions = PositionCache(net.spec, net.vision, metrics or Metrics())
    return PackedEncoder(net, positions, EncoderConfig(), torch.empty(0)).encode(
        pixels, grids(net.spec, pixels)
    )


class Session:
    """One sequence in a paged cache.

    `page_size` None: pages are of one token, and consecutive; else they are scattered.
    """

    def __init__(
        self,
        net: FamilyNet,
        prompt: Sequence[int],
        pixels: Sequence[np.ndarray],
        page_size: int | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.net = net
        images = images_of(net.spec, pixels)
        self.tokens, self.spans = net.spec.expand_prompt(prompt, images)
        self.embeddings = encode(net, [torch.from_numpy(image) for image in pixels])
        blocks = [net.spec.image_positions(image.grid) for image in images]
        self.positions, self.next_position = net.spec.positions(self.tokens, self.spans, blocks)
        self.done = 0
        size = 512
        caches = allocate_caches(net.spec.kv_spec(), size, 1, dtype, CPU)
        self.kv = keys_and_values(caches)
        for keys, values in self.kv.values():
            keys.fill_(torch.nan), values.fill_(torch.nan)
        self.states = StateMemory(net.spec.kv_spec(), 1, torch.float32, CPU).layers
        self.page_size = page_size or 1
        pages = torch.arange(7, size)
        if page_size is not None:
            pages = torch.randperm(size // page_size, generator=torch.Generator().manual_seed(0))
        self.pages = pages.int().unsqueeze(0)  # [1, P]

    def prefill(self, chunk: int | None = None) -> torch.Tensor:
        """Logits [T, vocab] of the whole prompt, computed `chunk` tokens at a time."""
        step, parts = chunk or len(self.tokens), []
        while (start := self.done) < len(self.tokens):
            end = self._whole(min(start + step, len(self.tokens)))
            parts.append(self._forward(self.tokens[start:end], self.positions[:, start:end]))
        return torch.cat(parts)

    def _whole(self, end: int) -> int:
        """The end of a chunk, moved behind an image that may not be cut."""
        uncut = self.spans if self.net.spec.kv_spec().whole_images else ()
        return next((span.end for span in uncut if span.start < end < span.end), end)

    def decode(self, token: int) -> torch.Tensor:
        """Logits [vocab] after one more token."""
        positions = np.full((self.net.spec.position_axes, 1), self.next_position)
        self.next_position += 1
        return self._forward([token], positions)[0]

    def _forward(self, tokens: Sequence[int], positions: np.ndarray) -> torch.Tensor:
        start, end = self.done, self.done + len(tokens)
        rows, pieces = self._splices(start, end)
        place = torch.arange(start, end)
        pages = self.pages[0, place // self.page_size]
        batch = Batch(
            tokens=torch.tensor(tokens),
            positions=torch.from_numpy(positions),
            out_slots=pages * self.page_size + place % self.page_size,
            slots=torch.tensor([0]),
            page_table=self.pages,
            q_starts=torch.tensor([0, end - start], dtype=torch.int32),
            kv_lengths=torch.tensor([end], dtype=torch.int32),
            singles=0,
            splice_rows=torch.tensor(rows, dtype=torch.int64),
            embeddings=torch.cat(pieces)
            if pieces
            else torch.empty(0, self.net.spec.embedding_width),
            sample_rows=torch.arange(end - start),
        )
        self.done = end
        kept = self.net.spec.kv_spec()
        attention = attention_for(self.kv, self.page_size, self.states, ops=self.net.ops, kept=kept)
        attention.plan(batch)
        return self.net.logits(self.net.forward(batch, attention))

    def _splices(self, start: int, end: int) -> tuple[list[int], list[torch.Tensor]]:
        rows: list[int] = []
        pieces = []
        for span in self.spans:
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                rows += range(low - start, high - start)
                first = span.offset - span.start
                pieces.append(self.embeddings[span.image][first + low : first + high])
        return rows, pieces
