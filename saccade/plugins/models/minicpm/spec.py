"""MiniCPM-V's `FamilySpec`: sizes, prompts, and the cached data per token or sequence.

The text before an image contains its index among the prompt's images, so the image's own tokens do
not depend on it. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from saccade.core.errors import CheckpointError, InvalidRequest
from saccade.core.family import Cuts, KVSpec
from saccade.core.types import Grid, Image, Span
from saccade.families.checkpoint import Checkpoint, Section, read_json
from saccade.families.kit.base_spec import (
    BaseSpec,
    FamilyOptions,
    Ids,
    ImagePiece,
    Placeholder,
    plain_cuts,
    read_options,
)
from saccade.families.kit.config_readers import read_tokenizer
from saccade.nn.shapes import TextConfig
from saccade.plugins.models.kit.hybrid_config import HybridConfig
from saccade.plugins.models.kit.hybrid_text import hybrid_caches, hybrid_cuts
from saccade.plugins.models.minicpm.config import (
    MERGES,
    MergingTower,
    read_sibling,
    read_text,
    read_vision,
)
from saccade.plugins.models.minicpm.images import SliceRules, read_images, view_tokens
from saccade.plugins.models.minicpm.positions import canvas_block, canvas_positions
from saccade.plugins.models.minicpm.video import FrameRules, read_video

MAX_NUMBERED = 1000
"""Maximum images in a prompt, if each is preceded by its index."""
MARKS = {
    "image_token": "<|image_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
"""The defaults of the names in tokenizer_config.json (`extra_special_tokens`)."""


@dataclass(frozen=True, slots=True)
class MiniCPMOptions(FamilyOptions):
    """downsample_mode: a key of `MERGES`. The default is the value in config.json."""

    downsample_mode: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlaceholder(Placeholder):
    """Expands to the tokens of an image: its index, the whole image between two markers, and each
    slice between two other markers.
    """

    numbers: tuple[Ids, ...]  # the tokens before each image. If empty, images have no index.
    slice: tuple[int, int]  # the tokens before and after a slice
    line: Ids  # the tokens between rows of slices

    @property
    def own(self) -> frozenset[int]:
        """The marker tokens around an image and its slices, without the tokens of the index."""
        return frozenset((*self.before, *self.after, *self.slice, *self.line))

    def pieces(self, number: int | None, image: Image) -> Sequence[ImagePiece]:
        whole, *slices = view_tokens(image.grid)
        begin, end = self.slice
        named = self.numbers[number] if self.numbers and number is not None else ()
        found = [ImagePiece((*named, *self.before), whole, self.after)]
        for at, length in enumerate(slices):
            line = self.line if at and not at % image.grid[3] else ()
            found.append(ImagePiece((*line, begin), length, (end,)))
        return found

    def expand(
        self, tokens: Sequence[int], images: Sequence[Image], times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Expand the placeholder as `Placeholder.expand` does.

        It also raises InvalidRequest if there are more images than indices. The frames of a video
        have no index.
        """
        numbered = len(images) - sum(time is not None for time in times)
        if self.numbers and numbered > len(self.numbers):
            raise InvalidRequest(
                f"the prompt has {numbered} images; this model numbers at most {len(self.numbers)}",
                param="messages",
            )
        return Placeholder.expand(self, tokens, images, times)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMSpec(BaseSpec):
    """MiniCPM-V's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: MergingTower
    text: TextConfig
    images: SliceRules
    hybrid: HybridConfig
    placeholder: SlicePlaceholder

    def with_options(self, options: Mapping[str, str]) -> MiniCPMSpec:
        chosen = read_options(MiniCPMOptions, self.family, options, downsample_mode=MERGES)
        merge = MERGES.get(chosen.downsample_mode, self.images.merge)
        siglip = replace(self.vision.siglip, merge=merge)
        images = replace(self.images, merge=merge)
        vision = replace(self.vision, siglip=siglip)
        video = self.video
        if isinstance(video, FrameRules):
            video = replace(video, slices=replace(video.slices, merge=merge))
        return replace(self, vision=vision, images=images, tiles=images, video=video)

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        return KVSpec(hybrid_caches(self.text, self.hybrid, ranks))

    @property
    def cuts(self) -> Cuts:
        plain, merged = plain_cuts(self.text, self.vision.siglip), 4 * self.vision.siglip.hidden
        return replace(
            plain,
            text=hybrid_cuts(self.text, self.hybrid.delta),
            encoder=(*plain.encoder, (merged, "values of merged patches")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasSpec(MiniCPMSpec):
    """A `MiniCPMSpec` for models whose image tokens have positions on a canvas (`positions.py`)."""

    position_axes = 3

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Expand the prompt as `FamilySpec.expand_prompt` does.

        It also raises InvalidRequest for an image's start marker without an image. The marker's
        position depends on the image after it, and a KV page may end between the two.
        """
        (mark,) = self.placeholder.before
        if mark in tokens:
            raise InvalidRequest(
                f"the prompt has token {mark}, which precedes images, but no image follows: omit "
                "it, because images add it themselves",
                param="messages",
            )
        return self.placeholder.expand(tokens, images, times)

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        return canvas_block(grid)

    def positions(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        blocks: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[npt.NDArray[np.int64], int]:
        return canvas_positions(tokens, spans, blocks, self.placeholder.own)


def minicpm_spec(checkpoint: Checkpoint) -> MiniCPMSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    sibling, section = read_sibling(config), config.section("text_config")
    text, hybrid = read_text(config, section, sibling)
    vision = read_vision(config, text.hidden, sibling)
    images = read_images(checkpoint, vision, sibling)
    placeholder = _placeholder(checkpoint, text.vocab_size)
    video = None if sibling.pages else read_video(checkpoint, images, numbered=sibling.axes == 1)
    if video is not None:
        placeholder = replace(placeholder, marks=(*placeholder.marks, video.token))
    if sibling.axes == 3:
        _check_marks(config, placeholder)
    return (MiniCPMSpec if sibling.axes == 1 else CanvasSpec)(
        family=sibling.name,
        vision=vision,
        text=text,
        images=images,
        tiles=images,
        placeholder=placeholder,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
        hybrid=hybrid,
        video=video,
    )


def _check_marks(config: Section, placeholder: SlicePlaceholder) -> None:
    """Raise CheckpointError if the tokenizer's markers differ from those in config.json."""
    (image_start,), (image_end,), line = placeholder.before, placeholder.after, placeholder.line
    slice_start, slice_end = placeholder.slice
    if len(line) != 1:
        raise CheckpointError(
            f"{config.where}: the tokenizer encodes a newline as {len(line)} tokens; this model's "
            "images need one"
        )
    for name, token in (
        ("image_start_id", image_start),
        ("image_end_id", image_end),
        ("slice_start_id", slice_start),
        ("slice_end_id", slice_end),
        ("newline_id", line[0]),
    ):
        if (found := config.integer(name)) != token:
            raise CheckpointError(
                f"{config.where}: {name} is {found}, but the tokenizer's is {token}"
            )


def _placeholder(checkpoint: Checkpoint, vocab: int) -> SlicePlaceholder:
    """Create the placeholder with the tokens that transformers' processor adds around images."""
    path = checkpoint.folder / "tokenizer.json"
    tokenizer = read_tokenizer(path)

    def ids(text: str) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    settings = read_json(checkpoint.folder / "tokenizer_config.json", required=False)
    named = settings.data.get("extra_special_tokens")
    # Older files list these tokens without their roles.
    names = Section(settings.where, named if isinstance(named, dict) else {})
    marks = {}
    for field, usual in MARKS.items():
        token = names.text(field, default=usual)
        found = tokenizer.token_to_id(token)
        if found is None or ids(token) != (found,):
            raise CheckpointError(f"{path}: the tokenizer has no token {token} ({field})")
        if found >= vocab:
            raise CheckpointError(
                f"{path}: {token} ({field}) is {found}, which is not in the vocabulary of {vocab} "
                "tokens"
            )
        marks[field] = found
    content = checkpoint.config.integer("image_token_id", default=marks["image_token"])
    if content != marks["image_token"]:
        raise CheckpointError(
            f"{checkpoint.config.where}: image_token_id is {content}, but the tokenizer's is "
            f"{marks['image_token']}"
        )
    numbers: tuple[Ids, ...] = ()
    if checkpoint.processor.flag("use_image_id", default=True):
        begin, end = marks["image_id_start_token"], marks["image_id_end_token"]
        numbers = tuple((begin, *ids(str(number)), end) for number in range(MAX_NUMBERED))
    return SlicePlaceholder(
        marks=(content,),
        numbers=numbers,
        before=(marks["image_start_token"],),
        after=(marks["image_end_token"],),
        slice=(marks["slice_start_token"], marks["slice_end_token"]),
        line=ids("\n"),
    )
