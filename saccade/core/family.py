"""What a model family defines without tensors: the `FamilySpec` protocol and its value types.

A spec is read from `config.json` and the files next to it. It has sizes, token counts, prompt
expansion and positions, and can be imported without torch. `nn.protocol.FamilyNet` is the
counterpart with tensors.
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
    """Limits on an image's height * width after resizing. Thumbnails are exempt."""

    least: int  # the smallest image that the model accepts
    min_pixels: int
    max_pixels: int
    cut: int | None = None  # with more images than this in a prompt, each is limited to `least`
    # True if the checkpoint's image processor has these bounds in `size`, as `shortest_edge` and
    # `longest_edge`
    as_edges: bool = False


@dataclass(frozen=True, slots=True)
class LargestImage:
    """The size of the largest image that the model accepts. pixels: height * width after
    preprocessing.
    """

    pixels: int
    tokens: int


CacheFormat = Literal["model", "float32", "int8", "float8_e4m3"]
"""The data type of cached values. model: the data type of the weights (`EngineConfig.dtype`)."""
FORMAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class Cache:
    """One named cache of a layer, which stores values of `shape` for each token or for each
    sequence.

    Per-token values are stored in KV pages. Per-sequence values (a recurrent state) take one row,
    however long the sequence is.

    k, v: keys and values of the heads.
    latent: one row per token from which keys and values are computed.
    k_scale, v_scale: scales of 8-bit values.
    recurrent, conv: recurrent states.
    """

    name: str
    shape: tuple[int, ...]
    per: Literal["token", "sequence"] = "token"
    format: CacheFormat = "model"

    def nbytes(self, dtype: Dtype) -> int:
        """Return the size of the cache in bytes, per token or per sequence, for a model in
        `dtype`.
        """
        return (
            math.prod(self.shape) * FORMAT_BYTES[dtype if self.format == "model" else self.format]
        )


BEHAVIOURS = {
    "latents": "the model caches latents (MLA)",
    "ranges": "the model's layers have windows, or bidirectional attention within images",
}
"""Attention features that a backend may lack, with a description of each for error messages."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention on one rank: the size of its KV cache, and which tokens attend to
    which.
    """

    heads: int  # key/value heads
    dim: int  # of each head
    owns: bool = True  # False if the layer reads an earlier layer's cache
    latent: bool = False  # one row serves as key and value for all query heads
    window: int | None = None  # tokens in the sliding window, including the query; None: unlimited
    both_ways: bool = False  # attention is bidirectional within each image
    format: CacheFormat = "model"

    @property
    def caches(self) -> tuple[Cache, ...]:
        names = ("latent",) if self.latent else ("k", "v")
        shape = (self.heads, self.dim)
        return tuple(Cache(name, shape, format=self.format) for name in names * self.owns)

    @property
    def behaviours(self) -> frozenset[str]:
        """The features from `BEHAVIOURS` that this layer's attention backend must support."""
        ranges = self.window is not None or self.both_ways
        return frozenset(["latents"] * self.latent + ["ranges"] * ranges)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV caches and recurrent states of all layers on one rank."""

    # each layer's attention, or the states of a layer without attention
    shapes: tuple[AttentionShape | tuple[Cache, ...], ...]
    drafts: bool = False  # the last layer belongs to an MTP head

    @property
    def layers(self) -> tuple[tuple[Cache, ...], ...]:
        """The caches of each layer, which may have none."""
        return tuple(
            each.caches if isinstance(each, AttentionShape) else each for each in self.shapes
        )

    @property
    def attention(self) -> dict[int, AttentionShape]:
        """The attention shape by layer index, without layers that have no attention."""
        return {
            layer: shape
            for layer, shape in enumerate(self.shapes)
            if isinstance(shape, AttentionShape)
        }

    @property
    def whole_images(self) -> bool:
        """True if attention is bidirectional within images.

        An image's keys and values then depend on the entire image, so prefill chunks must not split
        it.
        """
        return any(shape.both_ways for shape in self.attention.values())

    @property
    def sight(self) -> tuple[str, ...]:
        """Phrases that describe how attention differs from plain causal attention, for the start-up
        report.
        """
        shapes = self.attention.values()
        windows = [shape.window for shape in shapes if shape.window is not None]
        near = f"the last {max(windows, default=0)} in {len(windows)} of {len(shapes)} layers"
        return (near,) * bool(windows) + ("their image bidirectionally",) * self.whole_images

    @property
    def latent(self) -> bool:
        """True if layers cache latents (MLA) instead of keys and values."""
        return any(shape.latent for shape in self.attention.values())

    @property
    def kv_layers(self) -> int:
        """The number of layers that cache keys and values."""
        return sum(shape.owns and not shape.latent for shape in self.attention.values())

    def token_bytes(self, dtype: Dtype) -> int:
        """Return the bytes that one token takes in KV pages, over all layers."""
        return self._bytes("token", dtype)

    def state_bytes(self, dtype: Dtype) -> int:
        """Return the size in bytes of one sequence's recurrent state over all layers, or 0 if the
        model has none.
        """
        return self._bytes("sequence", dtype)

    def with_dtype(self, dtype: KVDtype) -> KVSpec:
        """Return this spec with keys and values in `dtype`, or unchanged if `dtype` is "auto"."""
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
    """Return the attention shape on one rank if `heads` key/value heads are divided among `ranks`
    ranks.

    If there are fewer heads than ranks, each rank holds one head and heads are replicated.
    """
    return AttentionShape(max(1, heads // ranks), dim, window=window, both_ways=both_ways)


def latent_cache(width: int) -> AttentionShape:
    """Return the attention shape of MLA: one latent of `width` values per token, replicated on
    every rank.

    All query heads compute their keys and values from it.
    """
    return AttentionShape(1, width, latent=True)


Divisible = tuple[tuple[int, str], ...]
"""Sizes that must be divisible by the number of ranks, as (size, plural noun for error
messages).
"""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The sizes that determine over how many ranks a model can be sharded."""

    text: Divisible
    heads: int  # query heads
    kv_heads: int
    encoder: Divisible
    encoder_width: int  # row width of the narrowest matrix of the vision encoder that is sharded
    experts: int = 0  # experts per layer
    expert_width: int = 0  # intermediate size of each expert
    lasting: int = (
        0  # values per token that each rank holds through all layers, besides hidden states
    )

    def obstacles(self, ranks: int, expert_slices: int | None = None) -> tuple[str, ...]:
        """Return the sizes that prevent sharding the language model over `ranks` ranks, for an
        error message.

        `expert_slices` is the number of slices that each expert is split into. It defaults to
        `ranks`.
        """
        found = [f"{count} {what}" for count, what in self.text if count % ranks]
        if self.expert_width % (ranks if expert_slices is None else expert_slices):
            found.append(f"{self.expert_width} values of an expert")
        if self.kv_heads % ranks and ranks % self.kv_heads:
            found.append(f"{self.kv_heads} key/value heads")
        return tuple(found)

    def encoder_obstacles(self, ranks: int) -> tuple[str, ...]:
        """Return the sizes that prevent sharding the vision encoder over `ranks` ranks, for an
        error message.
        """
        return tuple(f"{count} {what}" for count, what in self.encoder if count % ranks)


@dataclass(frozen=True, slots=True)
class ScoreTemplates:
    """The prompts on which a family's embedding and reranking checkpoints were trained."""

    instruction: str  # default system message for content to embed
    query: str  # default system message for a search query
    judge: str  # system message of a reranker
    task: str  # default instruction of a reranker
    marks: tuple[str, str, str]  # prefixes of a reranker's instruction, query and document
    empty: str  # replaces missing content
    labels: tuple[str, str]  # for a relevant document, and for an irrelevant one
    min_pixels: int  # min_pixels, max_pixels: used for images unless the request sets them
    max_pixels: int


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """Vector size and prompt template of a late interaction checkpoint, which returns one vector
    per prompt token.
    """

    width: int  # values per vector
    template: Path  # Jinja template that writes the prompt of an image, or of a query


@dataclass(frozen=True, slots=True)
class Templates:
    """Jinja chat templates that a family provides, and how its templates write images."""

    default: Path | None = None  # for checkpoints without one
    # for requests with tools, if a checkpoint's own template does not support tools and contains
    # all of `marks`
    tools: Path | None = None
    marks: tuple[str, ...] = ()
    scores: ScoreTemplates | None = None  # None if no checkpoint of the family embeds or ranks
    late: LateInteraction | None = None  # None unless the checkpoint has a vector per token
    # (the text that templates write for an image, the text that the family's processor replaces it
    # with). The result is tokenized together with the surrounding text.
    shown: tuple[str, str] | None = None
    # the token that templates write for an image, if a space is inserted between it and a word
    spaced: str = ""


FLAGS = "\U000f0000-\U000ffffd"
"""A character range of private-use characters. They mark offsets in a rendered prompt and are
removed again.
"""


def put_spaces(text: str, mark: str, opening: str = "<") -> str:
    """Insert a space after each `mark`, unless white space or a tag follows it.

    opening: the characters that can start a tag.
    """
    follows = rf"(?=[{FLAGS}]*[^\s{re.escape(opening)}{FLAGS}])"
    return re.sub(re.escape(mark) + follows, f"{mark} ", text)


Part = tuple[float, float, float, float]
"""A region of an image: (top, left, bottom, right), each as a fraction of the height or width."""


@dataclass(frozen=True, slots=True)
class CanvasTile:
    """A part of a preprocessed image that the vision encoder encodes separately."""

    window: Box  # its pixels in the preprocessed image
    grid: Grid  # the grid of an image that consists of this tile only
    # its rows in the image's embedding, in the vision encoder's order
    rows: tuple[range, ...]
    part: Part | None = None  # the region it shows, if `PreprocessParams.views` does not define it


class TileLayout(Protocol):
    """Splits an image into tiles, for families whose vision encoder encodes each tile
    independently.
    """

    def tiles(self, grid: Grid) -> tuple[CanvasTile, ...]:
        """Return an image's tiles in the vision encoder's order, or an empty tuple if there is only
        one.
        """
        ...


class FamilySpec(Protocol):
    """The properties of one checkpoint that can be computed without tensors."""

    @property
    def family(self) -> str:
        """The family's name in messages and fingerprints, such as "qwen3_vl"."""
        ...

    @property
    def unproven(self) -> str:
        """The architecture's name if no test compares its output with transformers, otherwise
        "".
        """
        ...

    @property
    def supports_cuda_graphs(self) -> bool:
        """True if the language model's steps and the vision encoder can be captured as CUDA
        graphs.
        """
        ...

    @property
    def sees_images(self) -> bool:
        """True if the model has a vision encoder.

        Otherwise requests contain only text. `recipe`, `sample` and `settings` are not called, and
        the sizes and counts of images are 0.
        """
        ...

    @property
    def pixel_bounds(self) -> PixelBounds:
        """The image size limits from the checkpoint. A request can narrow them."""
        ...

    @property
    def largest_image(self) -> LargestImage: ...

    @property
    def sample(self) -> PreprocessParams:
        """The preprocessing of a small image. The image's embedding serves as a fingerprint of the
        weights.
        """
        ...

    @property
    def patch_unit(self) -> int:
        """The number that every patch count of the vision encoder is a multiple of."""
        ...

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        """Return the KV caches and recurrent states on one of `ranks` ranks."""
        ...

    @property
    def cuts(self) -> Cuts: ...

    @property
    def encoder_blocks(self) -> int:
        """The number of transformer blocks in the vision encoder. Every patch passes through all of
        them.
        """
        ...

    @property
    def dtype(self) -> str:
        """The data type of the weights according to the checkpoint."""
        ...

    @property
    def templates(self) -> Templates: ...

    def with_options(self, options: Mapping[str, str]) -> FamilySpec:
        """Return a copy of the spec with `--family-option NAME=VALUE` options applied.

        Raises ConfigError, which lists the supported options.
        """
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """The maximum sequence length that the model was trained for, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def hidden_size(self) -> int:
        """The hidden size of the language model."""
        ...

    @property
    def embedding_width(self) -> int:
        """The number of values in each row of an image's embedding: the hidden size times (1 +
        deepstack levels).
        """
        ...

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        """Return the preprocessing of an image of this size, after EXIF rotation.

        Raises ImageError if the aspect ratio exceeds the family's limit.
        """
        ...

    def settings(self, recipe: PreprocessParams) -> bytes:
        """Return a 16-byte fingerprint of `recipe`, which is part of the image's cache key.

        It differs whenever the pixels that the encoder gets may differ.
        """
        ...

    @property
    def video(self) -> VideoRules | None:
        """The rules for videos, or None if the model does not support video."""
        ...

    @property
    def tiles(self) -> TileLayout | None:
        """The tile layout, or None if the vision encoder does not encode tiles independently."""
        ...

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of rows in an image's embedding, which is also its number of prompt
        tokens.
        """
        ...

    def num_patches(self, grid: Grid) -> int:
        """Return the number of patches that the vision encoder computes for an image."""
        ...

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Replace the k-th image placeholder with the tokens of `images[k]` and the tokens that the
        family puts around them.

        times: `Span.time` of each image. If empty, it is None for all images.

        Returns the tokens, and the spans that images take in them. Raises InvalidRequest if the
        numbers of placeholders and images differ.
        """
        ...

    def widened(self, at: int, spans: Sequence[Span], images: Sequence[Image]) -> int:
        """Return the index of prompt token `at` in the prompt that `expand_prompt` returned with
        `spans`.
        """
        ...

    @property
    def position_axes(self) -> int:
        """The number of axes of a token's rotary position: 1, or more for multimodal RoPE."""
        ...

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        """Compute the rotary positions [axes, num_tokens] of an image at the start of a prompt.

        Results are not cached. Callers that need them often should cache them.
        """
        ...

    def positions(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        blocks: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Compute the rotary positions [axes, T] of a prompt, and the position of the token that
        follows it.

        blocks: the `image_positions` of the image that each of `spans` refers to.

        Generated tokens advance the position by one on every axis.
        """
        ...
