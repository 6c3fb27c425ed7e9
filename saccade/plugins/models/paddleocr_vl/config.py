"""Reads the sizes of PaddleOCR-VL's language model and vision encoder from `config.json`.

The Hub's file has the language model's fields at the top level. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    check_channels,
    check_halves,
    read_axes,
    read_axial,
    read_head_dim,
    read_rope,
    read_text_config,
    refuse_unsupported,
)
from saccade.nn.shapes import MergedConfig, RopeConfig, TextConfig

ABSENT = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
"""The values that transformers uses for fields that config.json does not have."""


@dataclass(frozen=True, slots=True)
class FittedConfig(MergedConfig):
    """The sizes of the vision encoder and its projector.

    across: the number of learned positions along an edge. They are interpolated for each image.
    """

    across: int
    rope_theta: float


def read_text(config: Section, text: Section) -> TextConfig:
    """Read the sizes and options of the language model, an Ernie 4.5. Raises CheckpointError."""
    refuse_unsupported(text, "use_bias")
    # A null number of heads, or head size, follows from other fields.
    absent = {name: value for name, value in ABSENT.items() if name not in text.data}
    text = text.filled(absent)
    head_dim = read_head_dim(text)
    rope = read_rope(text)
    theta = rope.positive("rope_theta", default=text.positive("rope_theta"))
    axes = read_axes(rope, head_dim, (16, 24, 24))
    tied = any(each.flag("tie_word_embeddings", default=True) for each in (config, text))
    return read_text_config(text, RopeConfig(theta, axes, interleaved=False), head_dim, tied=tied)


def read_vision(config: Section, out: int) -> FittedConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    vision = config.section("vision_config")
    check_channels(vision)
    hidden = vision.count("hidden_size", default=1152)
    heads = vision.count("num_attention_heads", default=16)
    check_halves(vision, "hidden_size", hidden, heads)
    side, patch = vision.count("image_size", default=384), vision.count("patch_size", default=14)
    if side < patch:
        raise CheckpointError(
            f"{vision.where}: image_size {side} is less than a patch of {patch} pixels"
        )
    return FittedConfig(
        depth=vision.layers("num_hidden_layers", default=27),
        hidden=hidden,
        heads=heads,
        intermediate=vision.count("intermediate_size", default=4304),
        activation=vision.text("hidden_act", default="gelu_pytorch_tanh"),
        norm_eps=vision.number("layer_norm_eps", default=1e-6),
        patch=patch,
        merge=vision.count("spatial_merge_size", default=2),
        across=side // patch,
        rope_theta=read_axial(vision).positive("rope_theta", default=1e4),
        out_hidden=out,
    )
