"""Questions to a model family on the CPU: the `FamilySpec` protocol and its value types.

A spec answers from `config.json` and its neighbours alone: sizes, token counts, prompt expansion,
positions. No tensors, no torch. The tensor side is `nn.protocol.FamilyNet`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from saccade.core.config import Dtype, KVDtype
from saccade.core.recipe import Box, PreprocessParams
from saccade.core.types import Grid, Image, Span
from saccade.core.video import VideoRules


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Bounds on height * width after resizing. Thumbnails stay outside them.

    The model takes images from `least` pixels on.
    """

    least: int
    min_pixels: int
    max_pixels: int
    cut: int | None = None  # in a prompt with more images than this, each has at most `least`
    # the checkpoint's own processor calls the bounds `shortest_edge` and `longest_edge` in its
    # `size`
    as_edges: bool = False


@dataclass(frozen=True, slots=True)
class LargestImage:
    """The largest image's size within the model's own bounds. pixels: those on the canvas."""

    pixels: int
    tokens: int


CacheFormat = Literal["model", "float32", "int8", "float8_e4m3"]
"""The format of a cache's values. model: as the weights are (`EngineConfig.dtype`)."""
FORMAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class Cache:
    """One named tensor in a layer: values with `shape` for each token, or for each sequence.

    Per-token values are stored in pages. Per-sequence values (a state) have one row each, whatever
    the sequence's length. Names: "k" and "v" (the heads' keys and values), "latent" (one row from
    which keys and values are made), "k_scale" and "v_scale" (beside 8-bit values), "recurrent" and
    "conv" (states).
    """

    name: str
    shape: tuple[int, ...]
    per: Literal["token", "sequence"] = "token"
    format: CacheFormat = "model"

    def nbytes(self, dtype: Dtype) -> int:
        """Return the bytes for one token or sequence, where the model is in `dtype`."""
        return (
            math.prod(self.shape) * FORMAT_BYTES[dtype if self.format == "model" else self.format]
        )


BEHAVIOURS = {
    "latents": "the model caches latents (MLA)",
    "ranges": "the model's layers have windows, or bidirectional attention within images",
}
"""What layers may ask of attention beyond the causal attention of heads, in sentences."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention on one rank: what it keeps per token, and what a token sees."""

    heads: int  # heads, dim: for keys and values
    dim: int
    owns: bool = True  # False where the layer reads an earlier layer's cache
    latent: bool = False  # one row is keys and values at once, for all query heads
    window: int | None = None  # the last tokens that one sees, itself included; None: all
    both_ways: bool = False  # an image's tokens also see each other's successors
    format: CacheFormat = "model"  # the format that is kept

    @property
    def caches(self) -> tuple[Cache, ...]:
        names = ("latent",) if self.latent else ("k", "v")
        shape = (self.heads, self.dim)
        return tuple(Cache(name, shape, format=self.format) for name in names * self.owns)

    @property
    def behaviours(self) -> frozenset[str]:
        """Return what a backend must support, from `BEHAVIOURS`."""
        ranges = self.window is not None or self.both_ways
        return frozenset(["latents"] * self.latent + ["ranges"] * ranges)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One rank's storage, layer by layer in the network's order.

    Holds the shape of a layer's attention, or the states in a layer without attention. drafts: the
    last layer belongs to an MTP head.
    """

    shapes: tuple[AttentionShape | tuple[Cache, ...], ...]
    drafts: bool = False

    @property
    def layers(self) -> tuple[tuple[Cache, ...], ...]:
        """Return each layer's caches, possibly empty."""
        return tuple(
            each.caches if isinstance(each, AttentionShape) else each for each in self.shapes
        )

    @property
    def attention(self) -> dict[int, AttentionShape]:
        """Return the attention shape for each layer that has one."""
        return {
            layer: shape
            for layer, shape in enumerate(self.shapes)
            if isinstance(shape, AttentionShape)
        }

    @property
    def whole_images(self) -> bool:
        """Return True if an image's keys and values depend on the whole image.

        Chunks then end outside images.
        """
        return any(shape.both_ways for shape in self.attention.values())

    @property
    def sight(self) -> tuple[str, ...]:
        """Describe what tokens see, for people, where that differs from all tokens before."""
        shapes = self.attention.values()
        windows = [shape.window for shape in shapes if shape.window is not None]
        near = f"the last {max(windows, default=0)} in {len(windows)} of {len(shapes)} layers"
        return (near,) * bool(windows) + ("their image bidirectionally",) * self.whole_images

    @property
    def latent(self) -> bool:
        """Return True if layers keep latents instead of keys and values."""
        return any(shape.latent for shape in self.attention.values())

    @property
    def kv_layers(self) -> int:
        """Count the layers that have keys and values of their own."""
        return sum(shape.owns and not shape.latent for shape in self.attention.values())

    def token_bytes(self, dtype: Dtype) -> int:
        """Return the bytes per token on its page, over all layers."""
        return self._bytes("token", dtype)

    def state_bytes(self, dtype: Dtype) -> int:
        """Return the bytes for one sequence's state, over all layers; 0 without states."""
        return self._bytes("sequence", dtype)

    def with_dtype(self, dtype: KVDtype) -> KVSpec:
        """Return the same with keys and values in `dtype`; auto keeps the model's own."""
        if dtype == "auto":
            return self
        shapes = tuple(
            replace(each, format="float8_e4m3")
            if isinstance(each, AttentionShape) and not each.latent
            else each
            for each in self.shapes
        )
        return replace(self, shapes=shapes)

    def _bytes(self, per: str, dtype: Dtype) -> int:
        caches = (cache for layer in self.layers for cache in layer if cache.per == per)
        return sum(cache.nbytes(dtype) for cache in caches)


def heads_cache(
    heads: int, dim: int, ranks: int, *, window: int | None = None, both_ways: bool = False
) -> AttentionShape:
    """Return the attention shape on one of `ranks` ranks, which holds a share of the `heads`.

    `heads` counts those with keys and values. With fewer heads than ranks, several ranks hold the
    same head.
    """
    return AttentionShape(max(1, heads // ranks), dim, window=window, both_ways=both_ways)


def latent_cache(width: int) -> AttentionShape:
    """Return the attention shape over latents: one head, which each rank has whole.

    All query heads make their keys and values from it.
    """
    return AttentionShape(1, width, latent=True)


Divisible = tuple[tuple[int, str], ...]
"""Counts that must divide by the number of ranks, each with its name for people."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The ways to cut a model among ranks.

    `encoder_width`: the narrowest rows among the vision encoder's cut matrices.
    """

    text: Divisible
    heads: int  # attention's query heads
    kv_heads: int
    encoder: Divisible
    encoder_width: int
    experts: int = 0  # experts per layer, of `expert_width` values each
    expert_width: int = 0
    lasting: int = 0  # values per token that every rank keeps through all layers, beside its row

    def obstacles(self, ranks: int, expert_slices: int | None = None) -> tuple[str, ...]:
        """Return the sizes that prevent cutting the language model among `ranks` ranks.

        Each expert is cut into `expert_slices` slices, by default as many as ranks.
        """
        found = [f"{count} {what}" for count, what in self.text if count % ranks]
        if self.expert_width % (ranks if expert_slices is None else expert_slices):
            found.append(f"{self.expert_width} values of an expert")
        if self.kv_heads % ranks and ranks % self.kv_heads:
            found.append(f"{self.kv_heads} key/value heads")
        return tuple(found)

    def encoder_obstacles(self, ranks: int) -> tuple[str, ...]:
        """Return the sizes that prevent cutting the vision encoder among `ranks` ranks."""
        return tuple(f"{count} {what}" for count, what in self.encoder if count % ranks)


@dataclass(frozen=True, slots=True)
class ScoreTemplates:
    """How a family's embedding and ranking checkpoints were trained to be asked."""

    instruction: str  # the default system message for what is embedded
    query: str  # the same for a search query
    judge: str  # a ranker's system message
    task: str  # its default instruction. The client's own override both defaults.
    marks: tuple[str, str, str]  # prefixes of a ranker's instruction, query and document
    empty: str  # replaces missing content
    labels: tuple[str, str]  # for a document that answers, and for one that fails to
    min_pixels: int  # min_pixels, max_pixels: for an image without bounds of its own
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Templates:
    """Chat templates that a family brings, as Jinja files."""

    default: Path | None = None  # for checkpoints without one
    # for requests with tools, where a checkpoint's own template lacks them, but has all `marks` in
    # it
    tools: Path | None = None
    marks: tuple[str, ...] = ()
    scores: ScoreTemplates | None = None  # None if the family lacks checkpoints that embed or rank
    # the text that templates write for an image, and the text that the family's processor makes of
    # it, which is tokenized together with the text around it
    shown: tuple[str, str] | None = None
    # the token that templates write for an image, behind which a space is put where a word follows
    spaced: str = ""


FLAGS = "\U000f0000-\U000ffffd"
"""Characters of the first private plane: marks of places in a text, which stand for nothing."""


def put_spaces(text: str, mark: str, opening: str = "<") -> str:
    """Put a space behind each `mark`, unless white space or a tag follows.

    opening: characters that begin a tag.
    """
    follows = rf"(?=[{FLAGS}]*[^\s{re.escape(opening)}{FLAGS}])"
    return re.sub(re.escape(mark) + follows, f"{mark} ", text)


Part = tuple[float, float, float, float]
"""(top, left, bottom, right) in fractions of an image's edges."""


@dataclass(frozen=True, slots=True)
class CanvasTile:
    """A part of an image that the vision encoder encodes separately."""

    window: Box  # its pixels on the canvas
    grid: Grid  # what the family calls an image of this tile alone
    # the rows of the image's embedding that are the tile's, in the tower's order
    rows: tuple[range, ...]
    part: Part | None = None  # the part of the image shown, if the recipe's views do not define it


class TileLayout(Protocol):
    """The tiles of a family whose tower sees them apart."""

    def tiles(self, grid: Grid) -> tuple[CanvasTile, ...]:
        """Return an image's tiles in the tower's order. An image of a single tile has none."""
        ...


class FamilySpec(Protocol):
    """One checkpoint's CPU facts."""

    @property
    def family(self) -> str:
        """Name the family for people and fingerprints, e.g. "qwen3_vl"."""
        ...

    @property
    def unproven(self) -> str:
        """Return the architecture's name if its answers are untested against transformers' own,
        else "".
        """
        ...

    @property
    def supports_cuda_graphs(self) -> bool:
        """Return True if steps and towers may be captured, as Saccade's own networks may."""
        ...

    @property
    def sees_images(self) -> bool:
        """Return True if the model has a vision encoder.

        Without a tower, requests carry text alone. `recipe`, `sample` and `settings` stay uncalled,
        and counts and sizes for images are 0.
        """
        ...

    @property
    def pixel_bounds(self) -> PixelBounds:
        """Return the model's own bounds. A request may narrow them."""
        ...

    @property
    def largest_image(self) -> LargestImage: ...

    @property
    def sample(self) -> PreprocessParams:
        """Return a small image's recipe. Its embedding is the tower weights' fingerprint."""
        ...

    @property
    def patch_unit(self) -> int:
        """Return the unit that the vision encoder's patch counts are multiples of."""
        ...

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        """Return the storage on one of `ranks` ranks, layer by layer."""
        ...

    @property
    def cuts(self) -> Cuts: ...

    @property
    def encoder_blocks(self) -> int:
        """Return the number of blocks in the vision encoder. Each computes every patch."""
        ...

    @property
    def dtype(self) -> str:
        """Return the weights' number format, by the checkpoint's name."""
        ...

    @property
    def templates(self) -> Templates: ...

    def with_options(self, options: Mapping[str, str]) -> FamilySpec:
        """Return the spec with the family's own options (`--family-option NAME=VALUE`).

        Raises ConfigError, which lists the known options.
        """
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Return the largest position the model was made for, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def hidden_size(self) -> int:
        """Return the values per token between the language model's layers."""
        ...

    @property
    def embedding_width(self) -> int:
        """Return the values per image token in an embedding: hidden size, times (1 + deepstack
        levels).
        """
        ...

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        """Return the recipe for an upright image with the given size.

        Raises ImageError for an aspect ratio beyond the family's limit.
        """
        ...

    def settings(self, recipe: PreprocessParams) -> bytes:
        """Return 16 bytes that differ whenever the pixels handed to the encoder may differ."""
        ...

    @property
    def video(self) -> VideoRules | None:
        """Return the rules for videos, or None for a model without video."""
        ...

    @property
    def tiles(self) -> TileLayout | None:
        """Return the tiles that the tower sees apart, or None for a tower without."""
        ...

    def num_tokens(self, grid: Grid) -> int:
        """Return the rows in an image's embedding."""
        ...

    def num_patches(self, grid: Grid) -> int:
        """Return the patches that the vision encoder computes."""
        ...

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Replace the k-th image placeholder by all tokens of `images[k]`.

        Adds what the family puts around them. `times`: `Span.time` for each image; if empty, all
        are None.

        Raises InvalidRequest unless placeholders and images correspond.
        """
        ...

    def widened(self, at: int, spans: Sequence[Span], images: Sequence[Image]) -> int:
        """Return the offset of prompt token `at` after `expand_prompt` has expanded the images.

        It has expanded the placeholders for `images` into `spans`.
        """
        ...

    @property
    def position_axes(self) -> int:
        """Return the axes that a token's rotary position has."""
        ...

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        """Compute an image's rotary positions [axes, num_tokens] at the start of a prompt.

        Computed anew at every call; frequent callers cache the result.
        """
        ...

    def positions(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        blocks: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Compute rotary positions [axes, T] for a prompt, and the next position.

        `blocks` are the `image_positions` for the images that spans name. An answer's tokens
        advance all axes by one each.
        """
        ...
