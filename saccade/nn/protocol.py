"""A forward pass's inputs (`Batch`, `Pack`), its attention (`Attention`), and the contract with a
family's network (`FamilyNet`, `VisionNet`).

All are passed as arguments and stay out of globals. `runtime/` builds them.
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
    """T tokens in R rows, back to back, on the device at a fixed address.

    Row r is a sequence's last `q_starts[r + 1] - q_starts[r]` tokens. Once the row's own are
    cached, that sequence's first `kv_lengths[r]` tokens are in the KV cache, on the pages
    `page_table[slots[r]]`, in order. The page table's lines are slots, so that a step writes only
    new pages.
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
    singles: int  # how many rows, the first ones, have one token each
    # some of them
    splice_rows: torch.Tensor  # [S] int64
    # image rows to put instead of token embeddings at `splice_rows`, with all deepstack levels
    # side by side
    embeddings: torch.Tensor  # [S, embedding_width]
    sample_rows: torch.Tensor  # [D] int64; the rows before a draw
    adapters: tuple[AdapterRows, ...] = ()  # the tokens with an adapter
    # by a row's first token, the line in the state memory that gets the sequence's state after the
    # row
    kept: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What a layer with the gated delta rule takes in, for T tokens."""

    # queries, keys and values, before the convolution with weights `taps`, the newest input's last
    mixed: torch.Tensor  # [T, 2 Hk Dk + Hv Dv]
    taps: torch.Tensor  # [K, 2 Hk Dk + Hv Dv]
    decay: torch.Tensor  # [T, Hv] float32; logarithms, at most 0
    beta: torch.Tensor  # [T, Hv] float32; the part of a correction that is made


class Recurrence(Protocol):
    """Linear attention by the gated delta rule (`kernels/delta.py`), or a short convolution alone.

    It remembers each sequence by a state, which it brings up to date.
    """

    def __call__(self, inputs: DeltaInputs, layer: int) -> torch.Tensor:
        """Compute each token's values [T, Hv, Dv] from its sequence's state, the token included."""
        ...

    def convolve(self, x: torch.Tensor, taps: torch.Tensor, layer: int) -> torch.Tensor:
        """Compute each channel's sum over its sequence's last K inputs, for x [T, C].

        `taps`: the weights [K, C], the newest input's last.
        """
        ...


class Attention(Protocol):
    """Causal self-attention over the paged KV cache, writing keys and values.

    Also its substitute in layers with states.
    """

    @property
    def recurrence(self) -> Recurrence: ...

    def plan(self, batch: Batch) -> None:
        """Prepare for a batch. Call once per step, before the first layer."""
        ...

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QKNorm | None, layer: int
    ) -> torch.Tensor:
        """Attend with projected heads for queries, keys and values [T, Hq + 2 Hkv, D].

        Returns each query's attention [T, Hq, D]. Queries and keys are normalised and turned, and
        keys and values are cached. Then each query sees its own sequence's cached tokens, up to its
        own. May change `qkv`.
        """
        ...

    def attend_cached(
        self, q: torch.Tensor, rotation: Rotation, q_norm: QKNorm, layer: int
    ) -> torch.Tensor:
        """Attend with queries alone [T, Hq, D], which see what `layer` has cached in the step.

        This is for a layer without its own keys and values.
        """
        ...

    def over_latents(self, q: torch.Tensor, latents: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend over latents [T, L], in a layer that keeps these (`core.family.latent_cache`).

        Maps each head's query [T, Hq, L] to the mean [T, Hq, L] over the latents that it sees.
        Scores are divided by the root of L.
        """
        ...


@dataclass(frozen=True, slots=True)
class GridFacts:
    """All that a vision encoder needs to know about one grid of N patches (M tokens).

    Tensors are on the tower's device. Rows are in the order of the vision encoder's blocks, unless
    noted otherwise.
    """

    # each patch's place on each axis in the tower's rotary embedding
    places: torch.Tensor  # [A, N] int64
    # per kind of attention in the tower, how many patches each run has. Patches in a run attend to
    # each other.
    segments: tuple[tuple[int, ...], ...]
    # learned positions at the patches, in merged order, before `order` is applied, or `None`
    # without
    position_embedding: torch.Tensor | None = None  # [N, hidden]
    # the token, or the canvas block that becomes it, at each place in the tower's own order
    order: torch.Tensor | None = None  # [M] int64
    # the inverse, or for `split` alone each token's row among its image's. `None` means
    # reading order.
    restore: torch.Tensor | None = None  # [M] int64

    @property
    def num_patches(self) -> int:
        return self.places.shape[1]

    @property
    def nbytes(self) -> int:
        """Return the memory in bytes, nearly all on the device."""
        tensors = (self.places, self.position_embedding, self.order, self.restore)
        return sum(each.nbytes for each in tensors if each is not None) + 32 * sum(
            map(len, self.segments)
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows `rows` in a pack, which attend to its rows `keys`, within `segments`.

    Segments count from the first of `rows`. If `keys` are more than `rows`, all belong to one
    segment.
    """

    rows: slice
    keys: slice
    segments: Segments


@dataclass(frozen=True, slots=True)
class Pack:
    """Several images' rows, back to back, as a vision encoder's blocks take them. They are on the
    device.

    cuts: per kind of attention in the tower, as in `GridFacts.segments`, the pieces in which a
    block does its work. Pieces depend on the pack alone, so that embeddings have the same bits
    whenever the pieces are computed.
    """

    rows: torch.Tensor  # [N, hidden]
    places: torch.Tensor  # [A, N] int64
    cuts: tuple[tuple[Cut, ...], ...]
    attention: TowerAttention


Pieces = Generator[int, None, torch.Tensor]
"""Work in pieces: yields what the next piece costs in patch-blocks, does it when resumed, and
returns embeddings [M, embedding_width] of all images of a pack, in the tower's order, for
`VisionNet.split`; owned.
"""


class VisionNet(Protocol):
    """One checkpoint's vision tower.

    `blocks` reads only its argument, so that graphs can be captured.
    """

    @property
    def hidden(self) -> int:
        """Return how many values a row has."""
        ...

    @property
    def axes(self) -> int:
        """Return how many axes a patch's place has."""
        ...

    def rows(self, patches: int) -> int:
        """Return how many rows `blocks` makes from a pack of `patches`."""
        ...

    @property
    def depth(self) -> int:
        """Return how many blocks each patch passes."""
        ...

    @property
    def longest_segments(self) -> tuple[int | None, ...]:
        """Return the most patches that may see each other, for each kind of attention.

        `None` means all patches in an image.
        """
        ...

    def grid_facts(self, grid: Grid) -> GridFacts:
        """Compute an image's facts anew, without making the host wait.

        `runtime/vision/positions.py` keeps results.
        """
        ...

    def embed(self, pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        """Turn an image's canvas, uint8 [H, W, 3], into rows [N, hidden] on the device."""
        ...

    def blocks(self, pack: Pack) -> Pieces:
        """Run the tower's blocks, N x depth patch-blocks in all."""
        ...

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        """Split the output of `blocks` for a pack of these images, image by image.

        Each has [num_tokens, embedding_width], ordered as an image's tokens in a prompt, separators
        included, in its own memory.
        """
        ...


class TowerNet(Protocol):
    """The tensors of one checkpoint's vision tower, made as `nn.family_model.VisionOnlyNet`."""

    @property
    def spec(self) -> FamilySpec: ...

    @property
    def ops(self) -> Ops:
        """Return the network's kernels."""
        ...

    @property
    def vision(self) -> VisionNet: ...

    @property
    def adapters(self) -> Adapters:
        """Return the adapters' additions to products."""
        ...


class LanguageModel(Protocol):
    """The tensors of one checkpoint's language model."""

    @property
    def hidden(self) -> int:
        """Return how many values a state has."""
        ...

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Compute states as `FamilyNet.forward` does."""
        ...

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise states as `FamilyNet.normed` does."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits as `FamilyNet.logits` does."""
        ...


class DraftHead(Protocol):
    """An MTP head: drafts the token after next, token by token.

    Its layer is the last of `KVSpec.layers`.
    """

    def __call__(self, batch: Batch, states: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Compute the head's states [T, hidden].

        `batch`: the step's, but each token and image row is the next one's. `states`: [T, hidden],
        from `FamilyNet.normed` or the head's own.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Map the head's states [R, hidden] -> [R, vocab_size] in float32."""
        ...


class FamilyNet(TowerNet, Protocol):
    """One checkpoint's tensors.

    A family makes a `VisionNet` and a `LanguageModel`, and `nn.family_model.FullNet` the rest.
    """

    @property
    def hidden(self) -> int:
        """Return how many values a state has."""
        ...

    @property
    def head(self) -> DraftHead | None: ...

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Compute all T tokens' states, [T, hidden], after the last layer.

        `attention` has planned for `batch`. Reads only the arguments, so that a graph can be
        captured.
        """
        ...

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the last norm to some states [R, hidden] from `forward`.

        The result is the head's input.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, vocab_size] in float32 for some states from `forward`.

        Every rank takes part.
        """
        ...
