"""Reads the sizes of InternVL's language model and vision encoder from `config.json`.

Supports the model types of transformers: InternVL 2.5, 3 and 3.5 with Qwen2 or Qwen3, and
Qianfan-OCR. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    check_heads,
    check_side,
    read_head_dim,
    read_rope,
    read_text_config,
    read_theta,
    refuse_unsupported,
)
from saccade.nn.shapes import RopeConfig, TextConfig, TileConfig

NormKind = Literal["layer_norm", "rms_norm"]
ROPE_KINDS = ("default", "dynamic")
"""Supported types of RoPE. Dynamic scaling applies only beyond the model's native context length,
which is the maximum in Saccade.
"""


KINDS = ("internvl", "qianfan_ocr")
ABSENT: dict[str, dict[str, dict[str, object]]] = {
    "internvl": {},
    "qianfan_ocr": {
        "config": {"tie_word_embeddings": False},
        "text_config": {"model_type": "qwen3"},
        "vision_config": {"attention_bias": True},
    },
}
"""For each model type and section, the defaults of missing fields in which transformers' classes
differ.
"""


@dataclass(frozen=True, slots=True)
class InternVisionConfig(TileConfig):
    """The sizes of InternViT and its projector."""

    norm: NormKind
    qkv_bias: bool
    qk_norm: bool
    final_norm: bool  # there is a norm after the last block
    fused: bool  # queries, keys and values are one tensor in the files
    projector_activation: str

    @property
    def rows(self) -> int:
        """The number of rows per tile in the blocks: one for the class token, and one per patch."""
        return 1 + self.patches


def _square(section: Section, name: str, default: int) -> int:
    sides = set(section.integers(name, default=(default,)))
    if len(sides) != 1 or min(sides) < 1:
        raise CheckpointError(f"{section.where}: {name} must be one number, or two equal numbers")
    return sides.pop()


def read_kind(config: Section) -> str:
    """Return the model type, one of `KINDS`. Raises CheckpointError."""
    kind = config.text("model_type", default=KINDS[0])
    if kind not in KINDS:
        raise CheckpointError(
            f"{config.where}: model_type {kind!r} is not supported ({' and '.join(KINDS)} are)"
        )
    return kind


def _filled(config: Section, part: str) -> Section:
    """Return a section with the defaults of its model type added. "config" denotes the
    entire file.
    """
    section = config if part == "config" else config.section(part)
    return section.filled(ABSENT[read_kind(config)].get(part, {}))


def read_vision(config: Section, out: int) -> InternVisionConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    vision = _filled(config, "vision_config")
    if config.integers("vision_feature_layer", default=(-1,)) != (-1,):
        raise CheckpointError(f"{config.where}: vision_feature_layer must be -1, the last")
    if config.text("vision_feature_select_strategy", default="default") != "default":
        raise CheckpointError(
            f'{config.where}: vision_feature_select_strategy must be "default" (without the '
            "class token)"
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
    check_side(vision, side, patch, merge)
    hidden = vision.count("hidden_size", default=1024)
    heads = vision.count("num_attention_heads", default=16)
    check_heads(vision, hidden, heads)
    kinds: dict[str, NormKind] = {"layer_norm": "layer_norm", "rms_norm": "rms_norm"}
    norm = vision.text("norm_type", default="layer_norm")
    if norm not in kinds:
        raise CheckpointError(f"{vision.where}: norm_type {norm!r} is not supported")
    bias, fused = vision.flag("attention_bias"), read_kind(config) == "qianfan_ocr"
    if fused and not bias:
        raise CheckpointError(f"{vision.where}: attention_bias false is not supported")
    tower = InternVisionConfig(
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
        qkv_bias=bias,
        qk_norm=vision.flag("use_qk_norm"),
        final_norm=not vision.flag("use_mean_pooling", default=True),
        fused=fused,
        projector_activation=config.text("projector_hidden_act", default="gelu"),
        out_hidden=out,
    )
    if (count := config.integer("image_seq_length", default=tower.tokens)) != tower.tokens:
        raise CheckpointError(
            f"{config.where}: image_seq_length is {count}, but a tile of {side} pixels has "
            f"{tower.tokens} tokens"
        )
    return tower


def read_text(config: Section) -> TextConfig:
    """Read the language model's sizes and options from config.json. Raises CheckpointError."""
    config, text = _filled(config, "config"), _filled(config, "text_config")
    kind = text.text("model_type", default="qwen2")
    if kind not in ("qwen2", "qwen3"):
        raise CheckpointError(
            f"{text.where}: model_type {kind!r} is not supported (qwen2 and qwen3 are)"
        )
    refuse_unsupported(text, "use_sliding_window", "attention_bias")
    text = text.filled({"rms_norm_eps": 1e-6, "max_position_embeddings": 32768})
    third = kind == "qwen3"
    head_dim = read_head_dim(text.filled({"head_dim": 128}) if third else text)
    return read_text_config(
        text,
        RopeConfig(_rope_theta(text), (head_dim // 2,), interleaved=False),
        head_dim,
        # transformers' default. Older files do not have the field.
        tied=config.flag("tie_word_embeddings", default=True),
        qkv_bias=not third,
        qk_norm=third,
    )


def _rope_theta(text: Section) -> float:
    rope = read_rope(text, *ROPE_KINDS)
    return read_theta(text, rope)
