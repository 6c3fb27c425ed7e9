"""The inputs of a forward pass (`Batch`, `Pack`), its attention (`Attention`), and the contract of
a family's network (`FamilyNet`, `VisionNet`).

All are passed as arguments, never kept in a global. `runtime/` builds them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.low_rank import AdapterRows
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.rotary import Rotation
from saccade.kernels.reference.segments import Segments
from saccade.kernels.tower_attention import Backend
from saccade.nn.low_rank import Adapters


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R rows, back to back; on the device, at a fixed address.

    Row r is the last `q_starts[r + 1] - q_starts[r]` tokens of a sequence whose first
    `kv_lengths[r]` tokens are in the KV cache once the row's own are, on the pages
    `page_table[slots[r]]`, in order. Lines of the page table are slots, so that a step writes only
    new pages. singles: so many rows, the first ones, have one token each. embeddings: image rows to
    put in place of token embeddings at `splice_rows`; all deepstack levels side by side.
    sample_rows: the rows before a draw. adapters: the tokens with an adapter. kept: by the first
    token of a row, the line of the state memory that gets the sequence's state after the row.
    """

    # each token
    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [A, T] int64
    out_slots: torch.Tensor  # [T] int64: kv slot that each token's key and value go to
    # each row
    slots: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [slots, pages] int32
    q_starts: torch.Tensor  # [R + 1] int32
    kv_lengths: torch.Tensor  # [R] int32
    singles: int
    # some of them
    splice_rows: torch.Tensor  # [S] int64
    embeddings: torch.Tensor  # [S, embedding_width]
    sample_rows: torch.Tensor  # [D] int64
    adapters: tuple[AdapterRows, ...] = ()
    kept: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The inputs of a layer with the gated delta rule, for T tokens.

    mixed: queries, keys and values, before the convolution of weights `taps`, the newest input's
    last. decay: logarithms, at most 0. beta: the part of a correction that is made.
    """

    mixed: torch.Tensor  # [T, 2 Hk Dk + Hv Dv]
    taps: torch.Tensor  # [K, 2 Hk Dk + Hv Dv]
    decay: torch.Tensor  # [T, Hv] float32
    beta: torch.Tensor  # [T, Hv] float32


class Recurrence(Protocol):
    """Linear attention by the gated delta rule (`kernels/delta.py`), whose memory of each sequence
    is a state, brought up to date.
    """

    def __call__(self, inputs: DeltaInputs, layer: int) -> torch.Tensor:
        """Each token's values from its sequence's state [T, Hv, Dv], with its own."""
        ...


class Attention(Protocol):
    """Causal self-attention over the paged KV cache, writing keys and values; and its substitute in
    layers with states.
    """

    @property
    def recurrence(self) -> Recurrence: ...

    def plan(self, batch: Batch) -> None:
        """Prepare for a batch: once per step, before the first layer."""
        ...

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QKNorm | None, layer: int
    ) -> torch.Tensor:
        """Heads of queries, keys and values [T, Hq + 2 Hkv, D], as projected, to each query's
        attention [T, Hq, D].

        Queries and keys are normalised and turned; keys and values are cached; then each query sees
        the cached tokens of its own sequence, up to the query's. May change `qkv`.
        """
        ...

    def read(self, q: torch.Tensor, rotation: Rotation, q_norm: QKNorm, layer: int) -> torch.Tensor:
        """The same of queries alone [T, Hq, D], which see what `layer` has cached in the step:
        for a layer that has no keys and values of its own.
        """
        ...

    def over_latents(self, q: torch.Tensor, latents: torch.Tensor, layer: int) -> torch.Tensor:
        """The same over latents [T, L], of a layer that keeps these (`core.family.latent_cache`):
        each head's query [T, Hq, L] to its mean of the latents that it sees [T, Hq, L]. Scores are
        divided by the root of L.
        """
        ...


@dataclass(frozen=True, slots=True)
class GridFacts:
    """All facts that a vision tower needs of one grid of N patches (M tokens), on the tower's
    device.

    Rows are in the order of the tower's blocks, unless said otherwise. places: each patch's place
    on each axis of the tower's rotary embedding. position_embedding: learned positions at the
    patches, in merged order, before `order` is applied; None without. order: the token, or the
    block of the canvas that becomes it, at each place of the tower's own order, and `restore`, the
    inverse, or for `split` alone each token's row among those of its image; None for reading order.
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
        """Bytes of memory, nearly all on the device."""
        tensors = (self.places, self.position_embedding, self.order, self.restore)
        return sum(each.nbytes for each in tensors if each is not None) + 32 * sum(
            map(len, self.segments)
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows `rows` of a pack attend to its rows `keys`, within `segments` (of `rows`, from its first
    row on); if `keys` are more than `rows`, all belong to one segment.
    """

    rows: slice
    keys: slice
    segments: Segments


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows of several images, back to back, as for the blocks of a vision tower; on the device.

    cuts: for each kind of attention in the tower, as in `GridFacts.segments`, the pieces in which a
    block does its work. Pieces depend on the pack alone, so that embeddings have the same bits
    whenever the pieces are computed.
    """

    rows: torch.Tensor  # [N, hidden]
    places: torch.Tensor  # [A, N] int64
    cuts: tuple[tuple[Cut, ...], ...]
    attention: Backend


Pieces = Generator[int, None, torch.Tensor]
"""Work in pieces: yields what the next piece costs in patch-blocks, does it when resumed, and
returns embeddings [M, embedding_width] of all images of a pack, in the tower's order, for
`VisionNet.split`; owned.
"""


class VisionNet(Protocol):
    """The vision tower of one checkpoint.

    `blocks` reads nothing but its argument, so that graphs can be captured.
    """

    @property
    def hidden(self) -> int:
        """Values of a row."""
        ...

    @property
    def axes(self) -> int:
        """Axes of a patch's place."""
        ...

    def rows(self, patches: int) -> int:
        """The rows that `blocks` makes of a pack of so many patches."""
        ...

    @property
    def depth(self) -> int:
        """Blocks passed by each patch."""
        ...

    @property
    def longest_segments(self) -> tuple[int | None, ...]:
        """For each kind of attention, the most patches that may see each other; None: all of an
        image's.
        """
        ...

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Compute an image's facts anew, without a wait of the host. `runtime/vision/positions.py`
        keeps results.
        """
        ...

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        """The rows [N, hidden] of an image's canvas, uint8 [H, W, 3], on the device."""
        ...

    def blocks(self, pack: Pack) -> Pieces:
        """The tower's blocks, N x depth patch-blocks in all."""
        ...

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """The output of `blocks` for a pack of these images, image by image: [num_tokens,
        embedding_width] each, in the order of an image's tokens in a prompt, separators included,
        in memory of their own.
        """
        ...


class TowerNet(Protocol):
    """The tensors of one checkpoint's vision tower; made as `nn.net.TowerAlone`."""

    @property
    def spec(self) -> FamilySpec: ...

    @property
    def ops(self) -> Ops:
        """The kernels of the network."""
        ...

    @property
    def vision(self) -> VisionNet: ...

    @property
    def adapters(self) -> Adapters:
        """The adapters' additions to products."""
        ...


class LanguageModel(Protocol):
    """The tensors of one checkpoint's language model."""

    @property
    def hidden(self) -> int:
        """Values of a state."""
        ...

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """As `FamilyNet.forward`."""
        ...

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """As `FamilyNet.normed`."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """As `FamilyNet.logits`."""
        ...


class DraftHead(Protocol):
    """A head that drafts: guesses the token after next, token by token. Its layer is the last of
    `KVSpec.layers`.
    """

    def __call__(self, batch: Batch, states: torch.Tensor, attention: Attention) -> torch.Tensor:
        """The head's states [T, hidden]. batch: of the step, but each token and image row is the
        next one's. states: [T, hidden], `FamilyNet.normed`, or the head's own.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of the head's states -> [R, vocab_size] in float32."""
        ...


class FamilyNet(TowerNet, Protocol):
    """The tensors of one checkpoint; a family makes a `VisionNet` and a `LanguageModel`, and
    `nn.net.WholeNet` the rest.
    """

    @property
    def hidden(self) -> int:
        """Values of a state."""
        ...

    @property
    def head(self) -> DraftHead | None: ...

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """The states of all T tokens, [T, hidden], after the last layer; `attention` has planned
        for `batch`. Reads nothing but the arguments, so that a graph can be captured.
        """
        ...

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Some rows [R, hidden] of the states from `forward` after the last norm, as input of the
        head.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab_size] in float32 of some rows of the states from `forward`. Every rank
        takes part.
        """
        ...
