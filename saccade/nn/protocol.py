"""The arguments of a forward pass (`Batch`, `Pack`, `Attention`), and the protocols of a family's
network (`FamilyNet`, `VisionNet`).

All of them are passed as arguments, never as globals. `runtime/` builds them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.rotary import Rotation
from saccade.kernels.reference.segments import Segments, TowerAttention
from saccade.nn.low_rank import Adapters

if TYPE_CHECKING:
    from saccade.kernels.reference.low_rank import AdapterRows


@dataclass(frozen=True, slots=True)
class Batch:
    """The T tokens of R sequences, concatenated, in device tensors with fixed addresses.

    Row r is a sequence's last `q_starts[r + 1] - q_starts[r]` tokens. Once this step has cached
    their keys and values, the KV cache holds `kv_lengths[r]` tokens of that sequence, in the KV
    pages `page_table[slots[r]]`, in order. The page table is indexed by slot, so that a step only
    writes the entries of new pages.
    """

    # per token
    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [A, T] int64
    out_slots: torch.Tensor  # [T] int64: KV cache slot for each token's key and value
    # per row
    slots: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [slots, pages] int32
    q_starts: torch.Tensor  # [R + 1] int32
    kv_lengths: torch.Tensor  # [R] int32
    singles: int  # number of rows with a single token, which are the first ones
    # for some tokens
    splice_rows: torch.Tensor  # [S] int64
    # image embeddings that replace the token embeddings at `splice_rows`, with all deepstack levels
    # concatenated
    embeddings: torch.Tensor  # [S, embedding_width]
    sample_rows: torch.Tensor  # [D] int64: tokens whose logits are sampled from
    adapters: tuple[AdapterRows, ...] = ()  # the tokens with an adapter
    # index of a row's first token -> row of state memory that receives a copy of the sequence's
    # state after this batch row
    kept: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The inputs of a gated delta rule layer for T tokens."""

    # queries, keys and values before the convolution
    mixed: torch.Tensor  # [T, 2 Hk Dk + Hv Dv]
    # weights of the convolution, the newest input's last
    taps: torch.Tensor  # [K, 2 Hk Dk + Hv Dv]
    decay: torch.Tensor  # [T, Hv] float32; logarithms, at most 0
    beta: torch.Tensor  # [T, Hv] float32; the update's strength, 0 to 1


class Recurrence(Protocol):
    """Computes linear attention with the gated delta rule (`kernels/reference/delta.py`), or only a
    short convolution.

    It updates the state of each sequence.
    """

    def __call__(self, inputs: DeltaInputs, layer: int) -> torch.Tensor:
        """Return each token's values [T, Hv, Dv], from the state of its sequence after this
        token.
        """
        ...

    def convolve(self, x: torch.Tensor, taps: torch.Tensor, layer: int) -> torch.Tensor:
        """Convolve each channel of x [T, C] with the last K inputs of its sequence.

        taps: the weights [K, C]. The last one is for the newest input.
        """
        ...


class Attention(Protocol):
    """Computes causal self-attention over the paged KV cache, and writes keys and values to it.

    `recurrence` replaces it in layers with states.
    """

    @property
    def recurrence(self) -> Recurrence: ...

    def plan(self, batch: Batch) -> None:
        """Prepare for a batch. Call this once per step, before the first layer."""
        ...

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QKNorm | None, layer: int
    ) -> torch.Tensor:
        """Return the attention [T, Hq, D] of projected queries, keys and values [T, Hq + 2 Hkv, D].

        Queries and keys are normalized and rotated, and keys and values are cached. Each query then
        attends to the cached tokens of its sequence up to its own. May modify `qkv`.
        """
        ...

    def attend_cached(
        self, q: torch.Tensor, rotation: Rotation, q_norm: QKNorm, layer: int
    ) -> torch.Tensor:
        """Return the attention of queries [T, Hq, D] to the keys and values that `layer` cached in
        this step.

        Layers that share the KV cache of an earlier layer use it.
        """
        ...

    def over_latents(self, q: torch.Tensor, latents: torch.Tensor, layer: int) -> torch.Tensor:
        """Cache latents [T, L], and attend over the cached ones (MLA; `core.family.latent_cache`).

        Maps each head's queries [T, Hq, L] to weighted means of latents [T, Hq, L]. Scores are
        divided by sqrt(L).
        """
        ...


@dataclass(frozen=True, slots=True)
class GridFacts:
    """Everything that a vision encoder derives from a grid of N patches (M tokens).

    Tensors are on the encoder's device. Unless noted otherwise, patches are in the order in which
    the encoder's blocks compute them.
    """

    # each patch's position on each axis of the rotary embedding
    places: torch.Tensor  # [A, N] int64
    # for each type of attention in the encoder: the lengths of the segments of patches that attend
    # to each other
    segments: tuple[tuple[int, ...], ...]
    # learned position embeddings of the patches, in merged order (before `order`), if any
    position_embedding: torch.Tensor | None = None  # [N, hidden]
    # index of the token, or of the canvas block that becomes it, for each position in the encoder's
    # order
    order: torch.Tensor | None = None  # [M] int64
    # the inverse of `order`, or, if only `split` needs it, each token's row in its image; None:
    # reading order
    restore: torch.Tensor | None = None  # [M] int64

    @property
    def num_patches(self) -> int:
        return self.places.shape[1]

    @property
    def nbytes(self) -> int:
        """The size in bytes, nearly all of it on the device."""
        tensors = (self.places, self.position_embedding, self.order, self.restore)
        return sum(each.nbytes for each in tensors if each is not None) + 32 * sum(
            map(len, self.segments)
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of rows in a pack, which attend to the rows `keys` within `segments`.

    Segments are relative to the start of `rows`. If `keys` is longer than `rows`, all rows belong
    to one segment.
    """

    rows: slice
    keys: slice
    segments: Segments


@dataclass(frozen=True, slots=True)
class Pack:
    """The rows of images that are encoded together, concatenated on the device. This is the input
    of the encoder's blocks.
    """

    rows: torch.Tensor  # [N, hidden]
    places: torch.Tensor  # [A, N] int64
    # For each type of attention (as in `GridFacts.segments`): the chunks in which a block is
    # computed. They depend only on the pack, so embeddings do not depend on when a chunk runs.
    cuts: tuple[tuple[Cut, ...], ...]
    attention: TowerAttention


Pieces = Generator[int, None, torch.Tensor]
"""Work that can pause between chunks. The generator yields the cost of the next chunk in patches
times blocks, and computes it when resumed. It returns the embeddings [M, embedding_width] of all
images in a pack, in the encoder's order, as the input of `VisionNet.split`; owned by the caller.
"""


class VisionNet(Protocol):
    """The vision encoder of one checkpoint.

    `blocks` only reads its argument, so that it can be captured as a CUDA graph.
    """

    @property
    def hidden(self) -> int:
        """The number of values per row."""
        ...

    @property
    def axes(self) -> int:
        """The number of axes of a patch's position."""
        ...

    def rows(self, patches: int) -> int:
        """Return the number of rows that `blocks` returns for a pack of `patches` patches."""
        ...

    @property
    def depth(self) -> int:
        """The number of blocks that compute each patch."""
        ...

    @property
    def longest_segments(self) -> tuple[int | None, ...]:
        """The maximum segment length in patches, for each type of attention.

        None means that a segment covers an entire image.
        """
        ...

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Return what the encoder derives from an image's grid, without synchronizing with the
        device.

        `runtime/vision/positions.py` caches the results.
        """
        ...

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        """Return the embeddings of an image's N patches, [N, hidden], as input for `blocks`.

        pixels: the resized image, uint8 [H, W, 3], on the encoder's device.
        """
        ...

    def blocks(self, pack: Pack) -> Pieces:
        """Run the encoder's blocks in pieces, which cost N x depth in total."""
        ...

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the output of `blocks` by image.

        Each result is a separate tensor [num_tokens, embedding_width] in prompt order, including
        separators.
        """
        ...


class TowerNet(Protocol):
    """The network of a vision encoder, such as `nn.family_model.VisionOnlyNet`."""

    @property
    def spec(self) -> FamilySpec: ...

    @property
    def ops(self) -> Ops:
        """The kernels that the network uses."""
        ...

    @property
    def vision(self) -> VisionNet: ...

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters of the network's linear layers."""
        ...


class LanguageModel(Protocol):
    """The language model of one checkpoint."""

    @property
    def hidden(self) -> int:
        """The hidden size."""
        ...

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Return hidden states, as `FamilyNet.forward` does."""
        ...

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Return normalized hidden states, as `FamilyNet.normed` does."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits, as `FamilyNet.logits` does."""
        ...


class DraftHead(Protocol):
    """An MTP head, which drafts tokens one by one. The input of each is the token before it.

    It is the last layer in `KVSpec.layers`.
    """

    def __call__(self, batch: Batch, states: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Return the hidden states of the head, [T, hidden].

        batch: the batch of the step, but with tokens and image rows shifted by one, so that each
            row has the following token.
        states: the result of `FamilyNet.normed`, or earlier states of the head, [T, hidden].
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab_size] in float32 for states [R, hidden] of the head."""
        ...


class TokenVectors(Protocol):
    """The layer that maps a token's hidden state to its vector for late interaction."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Map states [R, hidden] from `FamilyNet.normed` to float32 vectors [R, width] of length
        1.
        """
        ...


class FamilyNet(TowerNet, Protocol):
    """The network of one checkpoint.

    A family builds a `VisionNet` and a `LanguageModel`, and `nn.family_model.FullNet` adds the
    rest.
    """

    @property
    def hidden(self) -> int:
        """The hidden size."""
        ...

    @property
    def head(self) -> DraftHead | None: ...

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Return the hidden states [T, hidden] of all tokens after the last layer.

        Call `attention.plan` with `batch` before. Only the arguments are read, so that the pass can
        be captured as a CUDA graph.
        """
        ...

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Return the final norm of states [R, hidden] from `forward`. The MTP head takes this as
        input.
        """
        ...

    def readout(self, states: torch.Tensor, adapters: Sequence[AdapterRows] = ()) -> torch.Tensor:
        """Return the pooled output for states [R, hidden] from `forward`, in float32.

        This is the result for a prompt that is read without labels. It is the result of `normed`,
        or of `TokenVectors` if the model has it.

        adapters: which rows of `states` use an adapter.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab_size] in float32 for states from `forward`. Every rank must call
        it.
        """
        ...
