"""What one forward pass reads (`Batch`), and what a family's network must answer (`FamilyNet`).

A `Batch` is passed as an argument, never kept in a global. `runtime/batch.py` builds it from a `Plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from saccade.core.family import FamilySpec
from saccade.kernels.attention import Context

KVCache = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer (keys, values), each [kv slots, kv heads, head dim]. A kv slot is page * page_size + offset in page."""


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of several sequences, back to back; on the device.

    contexts: one per sequence, in order, covering [0, T) (see kernels/attention.py).
    embeddings: image rows to put in place of token embeddings at `splice_rows`; all deepstack levels side by side.
    sample_rows: the rows whose logits are wanted.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [3, T] int64
    out_slots: torch.Tensor  # [T] int64: kv slot that each token's key and value go to
    contexts: tuple[Context, ...]
    splice_rows: torch.Tensor  # [S] int64
    embeddings: torch.Tensor  # [S, embedding_width]
    sample_rows: torch.Tensor  # [R] int64


class FamilyNet(Protocol):
    """The tensors of one checkpoint."""

    @property
    def spec(self) -> FamilySpec: ...

    def encode(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Embeddings of pictures of any mix of sizes, one packed forward.

        pixels: uint8 [H, W, 3] each, already resized (H and W are multiples of `factor`), on the network's device.
        Returns [num_tokens, embedding_width] each, in the network's dtype; owned by the caller, not views of one buffer.
        """
        ...

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Logits [R, vocab_size] in float32 of `batch.sample_rows`; writes the keys and values of all T tokens into `kv`."""
        ...
