"""SmolVLM's `FamilySpec`: sizes, and prompts with text for each tile's row and column.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import CheckpointError
from saccade.core.family import Templates
from saccade.core.types import Image
from saccade.families.checkpoint import Checkpoint, Section
from saccade.families.kit.base_spec import DecoderSpec, Ids, ImagePiece, Placeholder
from saccade.families.kit.config_readers import (
    SiglipDefaults,
    read_head_dim,
    read_rope,
    read_siglip,
    read_text_config,
    read_theta,
    read_tokenizer,
    refuse_unsupported,
)
from saccade.nn.shapes import RopeConfig, SiglipConfig, TextConfig
from saccade.plugins.models.smolvlm.images import SplitRules, read_images

TEMPLATES = Templates(default=Path(__file__).parent / "chat.jinja")
SIGLIP = SiglipDefaults(hidden=1152, heads=16, side=224, patch=32)
FAMILIES = ("idefics3", "smolvlm")
FAKE, IMAGE, OVERALL = "<fake_token_around_image>", "<image>", "<global-img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlaceholder(Placeholder):
    """Expands to the tokens of an image: `tokens` image tokens per tile, each after text for its
    row and column, and as many for the whole image.

    The whole image follows the tiles. The inherited field `before` has the tokens before it.
    """

    tokens: int
    places: tuple[tuple[Ids, ...], ...]  # [row][column]: before a tile that is not first in its row
    rows: tuple[Ids, ...]  # before the first tile of each row
    alone: Ids  # before an image without tiles

    def pieces(self, _number: int | None, image: Image) -> Sequence[ImagePiece]:
        rows, columns = image.grid
        if not rows:
            return (ImagePiece(self.alone, self.tokens, self.after),)
        tiles = (
            ImagePiece(self.places[row][column] if column else self.rows[row], self.tokens)
            for row in range(rows)
            for column in range(columns)
        )
        return (*tiles, ImagePiece(self.before, self.tokens, self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVLMSpec(DecoderSpec):
    """SmolVLM's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: SiglipConfig
    images: SplitRules


def smolvlm_spec(checkpoint: Checkpoint) -> SmolVLMSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = config.section("text_config")
    text = _text(config, section)
    merge = config.integer("scale_factor", default=2)
    vision = read_siglip(config.section("vision_config"), merge, text.hidden, SIGLIP)
    images = read_images(checkpoint.processor, vision)
    family = config.text("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{config.where}: model_type {family!r} is not supported ({' and '.join(FAMILIES)} are)"
        )
    return SmolVLMSpec(
        family=family,
        vision=vision,
        text=text,
        images=images,
        tiles=images,
        placeholder=_placeholder(checkpoint, images),
        templates=TEMPLATES,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )


def _text(config: Section, text: Section) -> TextConfig:
    kind = text.text("model_type", default="llama")
    if kind != "llama":
        raise CheckpointError(f"{text.where}: model_type {kind!r} is not supported (llama is)")
    refuse_unsupported(text, "attention_bias", "mlp_bias")
    text = text.filled({"rms_norm_eps": 1e-5, "max_position_embeddings": 2048})
    head_dim = read_head_dim(text)
    theta = read_theta(text, read_rope(text, "default"))
    rope = RopeConfig(theta, (head_dim // 2,), interleaved=False)
    return read_text_config(text, rope, head_dim, tied=config.flag("tie_word_embeddings"))


def _placeholder(checkpoint: Checkpoint, tiles: SplitRules) -> TilePlaceholder:
    """Create the placeholder with the tokens that transformers' processors add around tiles."""
    path = checkpoint.folder / "tokenizer.json"
    tokenizer = read_tokenizer(path)
    for token in (FAKE, IMAGE):
        if tokenizer.token_to_id(token) is None:
            raise CheckpointError(f"{path}: the tokenizer has no {token}")

    def ids(text: str) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    across = range(1, tiles.across + 1)
    return TilePlaceholder(
        marks=(checkpoint.config.integer("image_token_id", default=128257),),
        before=ids(f"\n\n{FAKE}{OVERALL}"),
        after=ids(FAKE),
        tokens=tiles.tokens,
        places=tuple(tuple(ids(f"{FAKE}<row_{r}_col_{c}>") for c in across) for r in across),
        rows=tuple(ids(f"{line}{FAKE}<row_{r}_col_1>") for r, line in _lines(across)),
        alone=ids(f"{FAKE}{OVERALL}"),
    )


def _lines(rows: range) -> list[tuple[int, str]]:
    """Yield the index of each row of tiles, and the text that ends the row before it."""
    return [(row, "\n" if row > 1 else "") for row in rows]
