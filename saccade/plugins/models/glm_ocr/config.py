"""Reads the sizes of GLM-OCR's language model and vision encoder from `config.json`.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    check_halves,
    read_axes,
    read_axial,
    read_head_dim,
    read_rope,
    read_text_config,
    read_theta,
    refuse_unsupported,
)
from saccade.nn.shapes import MergedConfig, RopeConfig, TextConfig

ABSENT = {
    "vocab_size": 59392,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
"""The values that transformers uses for fields that config.json does not have."""


@dataclass(frozen=True, slots=True)
class CogConfig(MergedConfig):
    """The sizes of the vision encoder and its merger."""

    frames: int  # temporal size of the first kernel. A still image is repeated over it.
    bias: bool  # the linear layers of blocks have biases
    rope_theta: float


def read_text(config: Section, text: Section) -> TextConfig:
    """Read the language model's sizes and options from config.json. Raises CheckpointError."""
    refuse_unsupported(text, "attention_bias")
    # A null number of heads, or head size, follows from other fields.
    absent = {name: value for name, value in ABSENT.items() if name not in text.data}
    text = text.filled(absent)
    head_dim, rope = read_head_dim(text), read_rope(text)
    if (share := rope.number("partial_rotary_factor", default=1.0)) != 1.0:
        raise CheckpointError(f"{rope.where}: partial_rotary_factor {share} is not supported")
    axes, theta = read_axes(rope, head_dim, (8, 12, 12)), read_theta(text, rope)
    rotary = RopeConfig(theta, axes, interleaved=False, pairs="neighbours")
    tied = any(each.flag("tie_word_embeddings") for each in (config, text))
    return read_text_config(text, rotary, head_dim, tied=tied)


def read_vision(config: Section, out: int) -> CogConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    vision = config.section("vision_config")
    if vision.integer("in_channels", default=3) != 3:
        raise CheckpointError(f"{vision.where}: in_channels must be 3")
    hidden = vision.count("hidden_size", default=1024)
    heads = vision.count("num_heads", "num_attention_heads", default=16)
    check_halves(vision, "hidden_size", hidden, heads)
    if (found := vision.count("out_hidden_size", default=1536)) != out:
        raise CheckpointError(
            f"{vision.where}: out_hidden_size {found} must be the language model's {out}"
        )
    return CogConfig(
        depth=vision.layers("depth", "num_hidden_layers", default=24),
        hidden=hidden,
        heads=heads,
        intermediate=vision.count("intermediate_size", default=4096),
        activation=vision.text("hidden_act", default="silu"),
        norm_eps=vision.number("rms_norm_eps", default=1e-5),
        patch=vision.count("patch_size", default=14),
        merge=vision.count("spatial_merge_size", default=2),
        frames=vision.count("temporal_patch_size", default=2),
        bias=vision.flag("attention_bias", default=True),
        rope_theta=read_axial(vision).positive("rope_theta", default=1e4),
        out_hidden=out,
    )
