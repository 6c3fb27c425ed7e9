"""InternVL's configuration, typed: what `config.json`, the image processor's file and the tokenizer
say, in the layouts of transformers' own class (InternVL 2.5, 3 and 3.5 with Qwen2 or Qwen3).

Knows nothing of torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.core.recipe import ImageRecipe, Resample
from saccade.families.checkpoint import Checkpoint, Section, read_json
from saccade.families.config_readers import (
    CLIP_MEAN,
    CLIP_STD,
    Colour,
    read_colours,
    read_heads,
    read_rope,
    read_theta,
    refuse_unsupported,
)
from saccade.nn.text_config import RopeConfig, TextConfig

NormKind = Literal["layer_norm", "rms_norm"]
RESAMPLES: dict[int, Resample] = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers."""
MOST_TILES = 256
"""Of an image: many times as many as in published checkpoints (12)."""
ROPE_KINDS = ("default", "dynamic")
"""Dynamic scaling begins beyond the model's own context, where nothing is served."""


@dataclass(frozen=True, slots=True)
class TileRules:
    """The cuts of an image: into `least` to `most` tiles of `side` x `side` pixels."""

    side: int
    least: int
    most: int
    mean: Colour
    std: Colour
    resample: Resample

    def fingerprint(self, family: str, recipe: ImageRecipe) -> bytes:
        """16 bytes that differ whenever the pixels handed to the encoder may differ."""
        named = repr((family, self.side, self.mean, self.std, recipe)).encode()
        return hashlib.blake2b(named, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class InternVisionConfig:
    """InternViT, which sees one tile of `side` x `side` pixels at a time, and the projector behind
    it.

    merge x merge neighbouring patches become one token. `final_norm`: after the last block.
    """

    # blocks
    depth: int
    hidden: int
    heads: int
    intermediate: int
    activation: str
    # patches
    side: int
    patch: int
    merge: int
    # norms and biases
    norm: NormKind
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    final_norm: bool
    # the projector
    projector_activation: str
    out_hidden: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def patches(self) -> int:
        """Of a tile."""
        return (self.side // self.patch) ** 2

    @property
    def rows(self) -> int:
        """That the blocks compute for a tile: its class token and its patches."""
        return 1 + self.patches

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return self.patches // self.merge**2


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Token ids: `content` stands in the template for an image, and then once for each row of its
    embedding, between `begin` and `end`.
    """

    begin: int
    content: int
    end: int


@dataclass(frozen=True, slots=True)
class InternVLConfig:
    """All that the JSON files say."""

    vision: InternVisionConfig
    text: TextConfig
    tiles: TileRules
    image_tokens: ImageTokens


def parse_config(checkpoint: Checkpoint) -> InternVLConfig:
    """Raises CheckpointError naming file and field."""
    config = checkpoint.config
    text = _text(config, config.section("text_config"))
    vision = _vision(config, config.section("vision_config"), text.hidden)
    if (count := config.integer("image_seq_length", default=vision.tokens)) != vision.tokens:
        raise CheckpointError(
            f"{config.where}: image_seq_length is {count}, but a tile of {vision.side} pixels has "
            f"{vision.tokens} tokens"
        )
    return InternVLConfig(
        vision, text, _tiles(vision, checkpoint.processor), _image_tokens(checkpoint)
    )


def _square(section: Section, name: str, default: int) -> int:
    """A side, where both are equal."""
    sides = set(section.integers(name, default=(default,)))
    if len(sides) != 1 or min(sides) < 1:
        raise CheckpointError(f"{section.where}: {name} must be one figure, or two that are equal")
    return sides.pop()


def _vision(config: Section, vision: Section, out: int) -> InternVisionConfig:
    if config.integers("vision_feature_layer", default=(-1,)) != (-1,):
        raise CheckpointError(f"{config.where}: vision_feature_layer must be -1, the last")
    if config.text("vision_feature_select_strategy", default="default") != "default":
        raise CheckpointError(
            f'{config.where}: vision_feature_select_strategy must be "default": without class token'
        )
    if not vision.flag("use_absolute_position_embeddings", default=True):
        raise CheckpointError(
            f"{vision.where}: use_absolute_position_embeddings false is not supported"
        )
    side, patch = _square(vision, "image_size", 448), _square(vision, "patch_size", 14)
    ratio = config.number("downsample_ratio", default=0.5)
    if not patch / side <= ratio <= 1:
        raise CheckpointError(
            f"{config.where}: downsample_ratio must be from {patch}/{side} (one token) to 1, not "
            f"{ratio}"
        )
    merge = int(1 / ratio)
    if side % (patch * merge):
        raise CheckpointError(
            f"{vision.where}: image_size {side} is no multiple of {merge} patches of {patch} pixels"
        )
    hidden = vision.count("hidden_size", default=1024)
    heads = vision.count("num_attention_heads", default=16)
    if hidden % heads:
        raise CheckpointError(f"{vision.where}: {hidden} values do not divide into {heads} heads")
    kinds: dict[str, NormKind] = {"layer_norm": "layer_norm", "rms_norm": "rms_norm"}
    norm = vision.text("norm_type", default="layer_norm")
    if norm not in kinds:
        raise CheckpointError(f"{vision.where}: norm_type {norm!r} is not supported")
    return InternVisionConfig(
        depth=vision.layers("num_hidden_layers", default=24),
        hidden=hidden,
        heads=heads,
        intermediate=vision.integer("intermediate_size", default=4096),
        activation=vision.text("hidden_act", default="gelu"),
        side=side,
        patch=patch,
        merge=merge,
        norm=kinds[norm],
        norm_eps=vision.number("layer_norm_eps", default=1e-6),
        qkv_bias=vision.flag("attention_bias"),
        qk_norm=vision.flag("use_qk_norm"),
        final_norm=not vision.flag("use_mean_pooling", default=True),
        projector_activation=config.text("projector_hidden_act", default="gelu"),
        out_hidden=out,
    )


def _text(config: Section, text: Section) -> TextConfig:
    kind = text.text("model_type", default="qwen2")
    if kind not in ("qwen2", "qwen3"):
        raise CheckpointError(
            f"{text.where}: model_type {kind!r} is not supported (qwen2 and qwen3 are)"
        )
    refuse_unsupported(text, "use_sliding_window", "attention_bias")
    hidden, (heads, kv_heads) = text.count("hidden_size"), read_heads(text)
    head_dim = text.count("head_dim", default=128 if kind == "qwen3" else hidden // heads)
    return TextConfig(
        vocab_size=text.count("vocab_size"),
        hidden=hidden,
        intermediate=text.integer("intermediate_size"),
        layers=text.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=text.number("rms_norm_eps", default=1e-6),
        rope=RopeConfig(_rope_theta(text), (head_dim // 2,), interleaved=False),
        context_length=text.count("max_position_embeddings", default=32768),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        # What transformers takes it for where the file does not say, as older files do not.
        tied=config.flag("tie_word_embeddings", default=True),
    )


def _rope_theta(text: Section) -> float:
    rope = read_rope(text, *ROPE_KINDS)
    return read_theta(text, rope)


def _tiles(vision: InternVisionConfig, processor: Section) -> TileRules:
    size = processor.section("size")
    for name in ("height", "width"):
        if (value := size.integer(name, default=vision.side)) != vision.side:
            raise CheckpointError(
                f"{size.where}: {name} is {value}, but the vision tower was made for {vision.side}"
            )
    number = processor.integer("resample", default=3)
    if number not in RESAMPLES:
        raise CheckpointError(
            f"{processor.where}: resample {number} is not supported (2 and 3 are)"
        )
    least = processor.integer("min_patches", default=1)
    most = processor.integer("max_patches", default=12)
    if not 1 <= least <= most <= MOST_TILES:
        raise CheckpointError(
            f"{processor.where}: min_patches is {least} and max_patches {most}: the first must be "
            f"at least 1, and at most the second, which may be {MOST_TILES}"
        )
    mean, std = read_colours(processor, CLIP_MEAN, CLIP_STD)
    return TileRules(
        side=vision.side,
        least=least,
        most=most,
        mean=mean,
        std=std,
        resample=RESAMPLES[number],
    )


def _image_tokens(checkpoint: Checkpoint) -> ImageTokens:
    settings = read_json(checkpoint.folder / "tokenizer_config.json", required=False)
    names = settings.section("extra_special_tokens") if _named(settings) else settings
    ids = _added_tokens(checkpoint.folder, settings)
    found = []
    for role, usual in (("start_image_token", "<img>"), ("end_image_token", "</img>")):
        name = names.text(role, default=settings.text(role, default=usual))
        if name not in ids:
            raise CheckpointError(f"{checkpoint.folder}: the tokenizer has no {role}, {name!r}")
        found.append(ids[name])
    content = checkpoint.config.integer("image_token_id", default=151667)
    return ImageTokens(found[0], content, found[1])


def _named(settings: Section) -> bool:
    """True where the tokenizer's special tokens have names of their own, not only a list."""
    return isinstance(settings.data.get("extra_special_tokens"), dict)


def _added_tokens(folder: Path, settings: Section) -> dict[str, int]:
    """Ids of added tokens by content: tokenizer_config.json's; where it lists none,
    tokenizer.json's.
    """
    added = settings.section("added_tokens_decoder").data
    if added:
        return {entry["content"]: int(number) for number, entry in added.items()}
    listed = read_json(folder / "tokenizer.json").data.get("added_tokens", [])
    return {entry["content"]: entry["id"] for entry in listed}
