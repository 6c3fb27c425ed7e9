"""Base classes for the specs of families (`core.family.FamilySpec`), with the methods that most
families share.

A spec is composed of objects: the sizes of the language model and of the vision encoder, an
`ImageLayout` and a `Placeholder`. A family defines these, its caches, and how ranks divide it
(`Cuts`). Runs without torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import NamedTuple, Protocol, Self, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError, ImageError, InvalidRequest
from saccade.core.family import (
    Cuts,
    KVSpec,
    LargestImage,
    PixelBounds,
    Templates,
    TileLayout,
    heads_cache,
)
from saccade.core.recipe import PreprocessParams
from saccade.core.types import Grid, Image, Span
from saccade.core.video import VideoRules
from saccade.nn.shapes import TextConfig

Ids = tuple[int, ...]
NO_TEMPLATES = Templates()
MAX_ASPECT = 200
"""The maximum aspect ratio. Beyond it, an image would be a single row of tokens."""


class ImageLayout(Protocol):
    """How images are preprocessed, and how many tokens they take. `FamilySpec` documents the
    methods.
    """

    @property
    def pixel_bounds(self) -> PixelBounds: ...

    @property
    def largest_image(self) -> LargestImage: ...

    @property
    def sample(self) -> PreprocessParams: ...

    @property
    def patch_unit(self) -> int: ...

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams: ...

    def settings(self, family: str, recipe: PreprocessParams) -> bytes: ...

    def num_tokens(self, grid: Grid) -> int: ...

    def num_patches(self, grid: Grid) -> int: ...


class ImagePiece(NamedTuple):
    """A contiguous part of an image's embedding in the prompt, with the tokens before and after
    it.
    """

    before: Ids
    length: int  # rows of the embedding
    after: Ids = ()


@dataclass(frozen=True, slots=True)
class Placeholder:
    """How the prompt represents an image: `before`, one token for each row of its embedding, and
    `after`.
    """

    marks: Ids  # placeholder tokens for an image in templates; empty for a text-only model
    row: int | None = None  # the token for each row; by default, the placeholder token
    before: Ids = ()
    after: Ids = ()

    def pieces(self, _number: int | None, image: Image) -> Sequence[ImagePiece]:
        """Return the pieces that represent an image in the prompt, at least one.

        _number: the index of the image among still images, or None for frames of a video.
        """
        return (ImagePiece(self.before, image.num_tokens, self.after),)

    def expand(
        self, tokens: Sequence[int], images: Sequence[Image], times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Replace each placeholder token with the tokens of its image (see
        `FamilySpec.expand_prompt`).
        """
        found = [at for at, token in enumerate(tokens) if token in self.marks]
        check_count(len(found), len(images))
        expanded: list[int] = []
        spans: list[Span] = []
        done = frames = 0
        for number, (at, image) in enumerate(zip(found, images)):
            expanded += tokens[done:at]
            row, offset = tokens[at] if self.row is None else self.row, 0
            time = times[number] if times else None
            frames += time is not None
            shown = number - frames if time is None else None
            for before, length, after in self.pieces(shown, image):
                expanded += before
                spans.append(Span(len(expanded), length, number, offset, time))
                expanded += (*[row] * length, *after)
                offset += length
            done = at + 1
        expanded += tokens[done:]
        return tuple(expanded), tuple(spans)

    def widened(self, at: int, spans: Sequence[Span], images: Sequence[Image]) -> int:
        """Return the index of prompt token `at` after the expansion (see `FamilySpec.widened`)."""
        frames = 0
        for number, group in groupby(spans, lambda span: span.image):
            of_image = list(group)
            frames += (timed := of_image[0].time is not None)
            pieces = self.pieces(None if timed else number - frames, images[number])
            start = of_image[0].start - len(pieces[0].before)
            if start >= at:
                break
            at += of_image[-1].end + len(pieces[-1].after) - start - 1
        return at


BLIND = Placeholder(())
"""The placeholder of a model without a vision encoder, for which all tokens are text."""


def check_count(placeholders: int, images: int) -> None:
    """Raise InvalidRequest unless the number of placeholders equals the number of images."""
    if placeholders != images:
        raise InvalidRequest(
            f"the prompt has {placeholders} image placeholders for {images} images",
            param="messages",
        )


class LanguageShape(Protocol):
    """The sizes of a language model that `BaseSpec` uses."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def hidden(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ShapedText:
    """Base class for the sizes of language models that have more fields than their `TextConfig`,
    `shape`.
    """

    shape: TextConfig

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def context_length(self) -> int:
        return self.shape.context_length

    @property
    def hidden(self) -> int:
        return self.shape.hidden


class TowerShape(Protocol):
    """The size of a vision encoder that `BaseSpec` uses.

    `depth` is its number of blocks, or 0 if the model has no vision encoder.
    """

    @property
    def depth(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """The methods of `core.family.FamilySpec` that most families share.

    A family adds `kv_spec` and `cuts`, and narrows the types of fields. By default, image tokens
    have positions like text tokens.
    """

    family: str
    vision: TowerShape
    text: LanguageShape
    images: ImageLayout
    placeholder: Placeholder
    eos_token_ids: tuple[int, ...]
    dtype: str
    templates: Templates = NO_TEMPLATES
    tiles: TileLayout | None = None  # `images`, if the vision encoder encodes tiles independently
    video: VideoRules | None = None

    position_axes = 1
    unproven = ""
    supports_cuda_graphs = True

    def with_options(self, options: Mapping[str, str]) -> Self:
        """Return this spec. Raise ConfigError if there are any options.

        Families with options override this.
        """
        read_options(FamilyOptions, self.family, options)
        return self

    # ---- the language model and the vision encoder

    @property
    def sees_images(self) -> bool:
        return self.vision.depth > 0

    @property
    def encoder_blocks(self) -> int:
        return self.vision.depth

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def context_length(self) -> int:
        return self.text.context_length

    @property
    def hidden_size(self) -> int:
        return self.text.hidden

    @property
    def embedding_width(self) -> int:
        return self.text.hidden

    # ---- images

    @property
    def pixel_bounds(self) -> PixelBounds:
        return self.images.pixel_bounds

    @property
    def largest_image(self) -> LargestImage:
        return self.images.largest_image

    @property
    def sample(self) -> PreprocessParams:
        return self.images.sample

    @property
    def patch_unit(self) -> int:
        return self.images.patch_unit

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        return self.images.recipe(height, width, bounds)

    def settings(self, recipe: PreprocessParams) -> bytes:
        return self.images.settings(self.family, recipe)

    def num_tokens(self, grid: Grid) -> int:
        return self.images.num_tokens(grid)

    def num_patches(self, grid: Grid) -> int:
        return self.images.num_patches(grid)

    # ---- prompts

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        return self.placeholder.expand(tokens, images, times)

    def widened(self, at: int, spans: Sequence[Span], images: Sequence[Image]) -> int:
        return self.placeholder.widened(at, spans, images)

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        return np.arange(self.num_tokens(grid))[None]

    def positions(
        self,
        tokens: Sequence[int],
        _spans: Sequence[Span],
        _blocks: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return the position of each token, which is its index in the prompt [1, T], and the next
        position.
        """
        return np.arange(len(tokens))[None], len(tokens)


def fingerprint(*facts: object) -> bytes:
    """Return a hash of `facts` (16 bytes), for `FamilySpec.settings`."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def check_aspect(height: int, width: int, longest: int) -> None:
    """Raise ImageError if the longer edge of an image exceeds `longest` times the shorter one."""
    if max(height, width) > longest * min(height, width):
        raise ImageError(
            f"the image is {width} x {height} px: its longer edge is more than "
            f"{longest} times the shorter; crop it"
        )


def stacked_bounds(tokens: int, unit: int) -> LargestImage:
    """Return the bounds of images that `core.recipe.stacked` shows twice.

    The narrower of the two views is padded. Padding at most doubles the canvas.

    tokens: the maximum number of tokens.
    unit: the side of a token in pixels.
    """
    return LargestImage(2 * tokens * unit**2, tokens)


class AttendingTower(TowerShape, Protocol):
    """The sizes of a vision encoder that consists of transformer blocks."""

    @property
    def hidden(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def intermediate(self) -> int: ...


def plain_cuts(text: TextConfig, tower: AttendingTower) -> Cuts:
    """Return how ranks divide a model whose language model and vision encoder have standard blocks.

    These are the language model of `nn/decoder.py` and a vision encoder of transformer blocks.
    """
    experts = text.experts if text.experts and text.experts.layers else None
    all_experts = experts is not None and len(experts.layers) == text.layers
    return Cuts(
        text=(
            (text.heads, "attention heads"),
            *(() if all_experts else ((text.intermediate, "MLP values"),)),
        ),
        heads=text.heads,
        kv_heads=text.kv_heads,
        encoder=(
            (tower.heads, "vision attention heads"),
            (tower.intermediate, "vision MLP values"),
        ),
        encoder_width=tower.hidden,
        experts=experts.count if experts else 0,
        expert_width=experts.width if experts else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(BaseSpec):
    """Base class for specs with a language model of `nn/decoder.py`.

    All layers cache the same number of keys and values.
    """

    vision: AttendingTower
    text: TextConfig

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        layer = heads_cache(self.text.kv_heads, self.text.head_dim, ranks)
        return KVSpec((layer,) * self.text.layers)

    @property
    def cuts(self) -> Cuts:
        return plain_cuts(self.text, self.vision)


# ---- family options


@dataclass(frozen=True, slots=True)
class FamilyOptions:
    """The options of a family that has none, and the base class of other families' options.

    A family adds a field for each of its options. The field's type is a Literal of the allowed
    values, or str if they depend on the checkpoint.
    """


Chosen = TypeVar("Chosen", bound=FamilyOptions)


def read_options(
    kind: type[Chosen],
    family: str,
    options: Mapping[str, str],
    **values: Iterable[str],
) -> Chosen:
    """Return the options with the values in `options`, and defaults for the others.

    Raises ConfigError with a list of the supported options.

    kind: the dataclass of the family's options.
    values: the allowed values of each option of type str. If these are empty, the checkpoint does
        not support the option.
    """
    types = get_type_hints(kind)
    known = {
        each.name: tuple(values.get(each.name, get_args(types[each.name]))) for each in fields(kind)
    }
    for name, value in options.items():
        if value not in known.get(name, ()):
            listed = [f"{each}, which is {' or '.join(few)}" for each, few in known.items() if few]
            has = ", and ".join(listed) or "no options"
            raise ConfigError(f"--family-option {name}={value}: {family} has {has}")
    return kind(**options)
