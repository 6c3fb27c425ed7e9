"""What one forward pass reads (`Batch`, `Pack`), and what a family's network must answer
(`FamilyNet`, `VisionNet`).

Both are passed as arguments, never kept in a global. `runtime/batch.py` and `runtime/encoder.py`
build them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.kernels.attention import Backend, Context, Segments

KVCache = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer (keys, values), each [kv slots, kv heads, head dim].

A kv slot is page * page_size + offset in page.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of several sequences, back to back; on the device.

    contexts: one per sequence, in order, covering [0, T) (see kernels/attention.py).
    embeddings: image rows to put in place of token embeddings at `splice_rows`; all deepstack
    levels side by side.
    sample_rows: the rows whose logits are wanted.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [3, T] int64
    out_slots: torch.Tensor  # [T] int64: kv slot that each token's key and value go to
    contexts: tuple[Context, ...]
    splice_rows: torch.Tensor  # [S] int64
    embeddings: torch.Tensor  # [S, embedding_width]
    sample_rows: torch.Tensor  # [R] int64


@dataclass(frozen=True, slots=True)
class GridFacts:
    """All that a vision tower needs to know of one grid of N patches (M tokens), on the tower's
    device.

    Rows are in the order in which the tower's blocks see them, except where said.
    places: where each patch stands on each axis that the tower's rotary embedding turns by.
    position_embedding: learned positions at the patches, in merged order, before `order` is
    applied; None without.
    order: which token stands at each place of the tower's own order, and `restore`, its inverse;
    None where it keeps reading order.
    segments: for each kind of attention in the tower, the lengths in patches of the runs that
    attend to each other.
    """

    places: torch.Tensor  # [A, N] int64
    position_embedding: torch.Tensor | None  # [N, hidden]
    order: torch.Tensor | None  # [M] int64
    restore: torch.Tensor | None  # [M] int64
    segments: tuple[tuple[int, ...], ...]

    @property
    def num_patches(self) -> int:
        return self.places.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of memory, nearly all of them on the device."""
        tensors = (self.places, self.position_embedding, self.order, self.restore)
        return sum(each.nbytes for each in tensors if each is not None) + 32 * sum(
            map(len, self.segments)
        )


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows of several pictures, back to back, as the blocks of a vision tower take them; on the
    device.

    segments: one for each kind of attention, as in `GridFacts`.
    """

    rows: torch.Tensor  # [N, hidden]
    places: torch.Tensor  # [A, N] int64
    segments: tuple[Segments, ...]
    attention: Backend


class VisionNet(Protocol):
    """The vision tower of one checkpoint.

    `blocks` reads nothing but its argument, so that a graph of it can be captured.
    """

    @property
    def hidden(self) -> int:
        """Values of a row."""
        ...

    @property
    def axes(self) -> int:
        """Axes of a patch's place."""
        ...

    @property
    def merged(self) -> int:
        """Patches per token."""
        ...

    @property
    def longest_segments(self) -> tuple[int | None, ...]:
        """For each kind of attention, the most patches that may see each other; None: as many as a
        picture has.
        """
        ...

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Computed anew at every call: `runtime/positions.py` keeps them."""
        ...

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        """The rows [N, hidden] of a picture, uint8 [H, W, 3], already resized, on the device."""
        ...

    def blocks(self, pack: Pack) -> torch.Tensor:
        """Embeddings [M, embedding_width] of all pictures of a pack, in the tower's order;
        owned.
        """
        ...


class FamilyNet(Protocol):
    """The tensors of one checkpoint."""

    @property
    def spec(self) -> FamilySpec: ...

    @property
    def vision(self) -> VisionNet: ...

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Logits [R, vocab_size] in float32 of `batch.sample_rows`; writes the keys and values of
        all T tokens into `kv`.
        """
        ...
