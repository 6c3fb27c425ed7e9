"""LFM2-VL's `FamilySpec`: sizes, prompts in which tokens name the row and column of each tile, and
the cached data per token or sequence.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from saccade.core.errors import CheckpointError
from saccade.core.family import Cache, Cuts, KVSpec, heads_cache
from saccade.core.types import Image
from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.base_spec import BaseSpec, Ids, ImagePiece, Placeholder, plain_cuts
from saccade.families.kit.config_readers import read_tokenizer
from saccade.nn.shapes import SiglipConfig, TextConfig
from saccade.plugins.models.lfm2_vl.config import (
    ConvolutionConfig,
    ProjectorConfig,
    read_text,
    read_vision,
)
from saccade.plugins.models.lfm2_vl.images import ThumbnailRules, read_images

FAMILY = "lfm2_vl"
IMAGE, START, END, THUMBNAIL = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThumbnailPlaceholder(Placeholder):
    """Expands to the tokens of an image: one part per tile, and one for the whole image if it is
    encoded, too.
    """

    rules: ThumbnailRules  # count the tokens in each piece
    places: tuple[tuple[Ids, ...], ...]  # [row][column]: the tokens before each tile
    thumbnail: Ids  # the tokens before the whole image, which follows its tiles

    def pieces(self, _number: int | None, image: Image) -> Sequence[ImagePiece]:
        counts, names = self.rules.view_tokens(image.grid), list[Ids]([()])
        if len(image.grid) > 2:
            down, across = image.grid[2:]
            names = [self.places[row][column] for row in range(down) for column in range(across)]
            names.append(self.thumbnail)
        named = zip(names, counts)  # without a thumbnail, the last name is unused
        first, *others = (ImagePiece(before, length) for before, length in named)
        found = [first._replace(before=(*self.before, *first.before)), *others]
        return (*found[:-1], found[-1]._replace(after=self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Spec(BaseSpec):
    """LFM2-VL's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: SiglipConfig
    text: TextConfig
    images: ThumbnailRules
    convolutions: ConvolutionConfig
    projector: ProjectorConfig

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        text, convolutions = self.text, self.convolutions
        full = heads_cache(text.kv_heads, text.head_dim, ranks)
        state = (Cache("conv", (convolutions.taps - 1, text.hidden // ranks), "sequence"),)
        return KVSpec(tuple(full if is_full else state for is_full in convolutions.full))

    @property
    def cuts(self) -> Cuts:
        plain = plain_cuts(self.text, self.vision)
        return replace(
            plain,
            text=(*plain.text, (self.text.hidden, "convolution channels")),
            encoder=(*plain.encoder, (self.projector.hidden, "values of the projector")),
        )


def lfm2_spec(checkpoint: Checkpoint) -> Lfm2Spec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = config.section("text_config")
    text, convolutions = read_text(config, section)
    vision, projector = read_vision(config, text.hidden)
    images = read_images(checkpoint.processor, vision)
    return Lfm2Spec(
        family=FAMILY,
        vision=vision,
        text=text,
        images=images,
        tiles=images,
        placeholder=_placeholder(checkpoint, images),
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
        convolutions=convolutions,
        projector=projector,
    )


def _placeholder(checkpoint: Checkpoint, rules: ThumbnailRules) -> ThumbnailPlaceholder:
    """Create the placeholder with the tokens that transformers' processor adds around tiles."""
    path = checkpoint.folder / "tokenizer.json"
    tokenizer = read_tokenizer(path)
    named = checkpoint.processor.flag("use_image_special_tokens", default=True)

    def ids(text: str) -> Ids:
        if not named:
            return ()
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    content = tokenizer.token_to_id(IMAGE)
    if content is None:
        raise CheckpointError(f"{path}: the tokenizer has no {IMAGE}")
    across = range(1, rules.tiles_at_most + 1)
    return ThumbnailPlaceholder(
        marks=(checkpoint.config.integer("image_token_id", default=396),),
        before=ids(START),
        after=ids(END),
        rules=rules,
        places=tuple(tuple(ids(f"<|img_row_{r}_col_{c}|>") for c in across) for r in across),
        thumbnail=ids(THUMBNAIL),
    )
