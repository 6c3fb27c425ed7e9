"""SmolVLM's configuration, typed: what `config.json`, the image processor's file and the tokenizer
say, for transformers' classes Idefics3 and SmolVLM (SmolVLM2 too), with Llama as language model.

Knows nothing of torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.core.recipe import ImageRecipe, Resample
from saccade.families.checkpoint import Checkpoint, Section
from saccade.families.config_readers import (
    HALF,
    Colour,
    SiglipDefaults,
    read_colours,
    read_heads,
    read_resample,
    read_rope,
    read_siglip,
    read_theta,
    read_tokenizer,
    refuse_unsupported,
)
from saccade.nn.siglip_config import SiglipConfig
from saccade.nn.text_config import RopeConfig, TextConfig

SIGLIP = SiglipDefaults(hidden=1152, heads=16, side=224, patch=32)
LONGEST = 4096
"""Pixels of an edge, beyond which transformers shrinks again."""
MOST_ACROSS = 32
"""Tiles; no checkpoint has more than six."""
RESIZED = "by torch"
"""Part of an image's name: an earlier version had Pillow's pixels, which are others."""
FAMILIES = ("idefics3", "smolvlm")
FAKE, IMAGE, OVERALL = "<fake_token_around_image>", "<image>", "<global-img>"

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SplitRules:
    """The cuts of an image whose longer edge is resized to `edge` pixels: into tiles of `side` x
    `side`, if `split`.
    """

    side: int
    edge: int
    split: bool
    mean: Colour
    std: Colour
    resample: Resample

    @property
    def across(self) -> int:
        """Tiles along the longer edge."""
        return -(-self.edge // self.side) if self.split else 1

    def fingerprint(self, family: str, recipe: ImageRecipe) -> bytes:
        """16 bytes that differ whenever the pixels handed to the encoder may differ."""
        named = repr((family, RESIZED, self.side, self.mean, self.std, recipe)).encode()
        return hashlib.blake2b(named, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ImageText:
    """Token ids around tiles in the prompt. `content` stands in the template for an image, and then
    once for each row of its embedding.

    rows[row]: before the first tile of a row. places[row][column]: before another. overall: before
    the whole image, shown after its tiles; alone: shown without tiles. end: after all.
    """

    content: int
    places: tuple[tuple[Ids, ...], ...]
    rows: tuple[Ids, ...]
    overall: Ids
    alone: Ids
    end: Ids


@dataclass(frozen=True, slots=True)
class SmolVLMConfig:
    """All that the JSON files say."""

    family: str
    vision: SiglipConfig
    text: TextConfig
    tiles: SplitRules
    image_text: ImageText


def parse_config(checkpoint: Checkpoint) -> SmolVLMConfig:
    """Raises CheckpointError naming file and field."""
    config = checkpoint.config
    text = _text(config, config.section("text_config"))
    merge = config.integer("scale_factor", default=2)
    vision = read_siglip(config.section("vision_config"), merge, text.hidden, SIGLIP)
    tiles = _tiles(vision, checkpoint.processor)
    family = config.text("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{config.where}: model_type {family!r} is not supported ({' and '.join(FAMILIES)} are)"
        )
    return SmolVLMConfig(family, vision, text, tiles, _image_text(checkpoint, tiles))


def _text(config: Section, text: Section) -> TextConfig:
    kind = text.text("model_type", default="llama")
    if kind != "llama":
        raise CheckpointError(f"{text.where}: model_type {kind!r} is not supported (llama is)")
    refuse_unsupported(text, "attention_bias", "mlp_bias")
    hidden, (heads, kv_heads) = text.count("hidden_size"), read_heads(text)
    head_dim = text.count("head_dim", default=hidden // heads)
    rope = read_rope(text, "default")
    theta = read_theta(text, rope)
    return TextConfig(
        vocab_size=text.count("vocab_size"),
        hidden=hidden,
        intermediate=text.integer("intermediate_size"),
        layers=text.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=text.number("rms_norm_eps", default=1e-5),
        rope=RopeConfig(theta, (head_dim // 2,), interleaved=False),
        context_length=text.count("max_position_embeddings", default=2048),
        qkv_bias=False,
        qk_norm=False,
        tied=config.flag("tie_word_embeddings"),
    )


def _tiles(vision: SiglipConfig, processor: Section) -> SplitRules:
    tile = processor.section("max_image_size")
    side = tile.integer("longest_edge", default=364)
    if side != vision.side:
        raise CheckpointError(
            f"{tile.where}: longest_edge is {side}, but the vision tower was made for {vision.side}"
        )
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not processor.flag(name, default=True):
            raise CheckpointError(f"{processor.where}: {name} false is not supported")
    size = processor.section("size")
    edge = size.integer("longest_edge", default=4 * 364)
    most = min(LONGEST, MOST_ACROSS * side)
    if not 2 <= edge <= most or edge % 2:
        raise CheckpointError(
            f"{size.where}: longest_edge is {edge}, but must be even, and at most {most}"
        )
    mean, std = read_colours(processor, HALF, HALF)
    split = processor.flag("do_image_splitting", default=True)
    return SplitRules(side, edge, split, mean, std, read_resample(processor, 1))


def _image_text(checkpoint: Checkpoint, tiles: SplitRules) -> ImageText:
    """As the tokenizer writes what transformers' processors put around tiles."""
    path = checkpoint.folder / "tokenizer.json"
    tokenizer = read_tokenizer(path)
    for token in (FAKE, IMAGE):
        if tokenizer.token_to_id(token) is None:
            raise CheckpointError(f"{path}: the tokenizer has no {token}")

    def ids(text: str) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    across = range(1, tiles.across + 1)
    return ImageText(
        content=checkpoint.config.integer("image_token_id", default=128257),
        places=tuple(tuple(ids(f"{FAKE}<row_{r}_col_{c}>") for c in across) for r in across),
        rows=tuple(ids(f"{line}{FAKE}<row_{r}_col_1>") for r, line in _lines(across)),
        overall=ids(f"\n\n{FAKE}{OVERALL}"),
        alone=ids(f"{FAKE}{OVERALL}"),
        end=ids(FAKE),
    )


def _lines(rows: range) -> list[tuple[int, str]]:
    """Each row, and the text that ends the one before it."""
    return [(row, "\n" if row > 1 else "") for row in rows]
