"""Reads the sizes of dots.ocr's language model and vision encoder from `config.json`.

The language model's fields are at the top level. They are Qwen2's fields. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    check_channels,
    check_halves,
    read_head_dim,
    read_rope,
    read_text_config,
    read_theta,
    refuse_flags,
    refuse_unsupported,
)
from saccade.nn.shapes import MergedConfig, RopeConfig, TextConfig


@dataclass(frozen=True, slots=True)
class DotsConfig(MergedConfig):
    """The sizes of the vision encoder and its merger."""

    bias: bool  # blocks have biases
    last_norm: bool  # there is a norm after the last block


def read_text(config: Section) -> TextConfig:
    """Read the language model's sizes and options from config.json. Raises CheckpointError."""
    refuse_unsupported(config, "use_sliding_window")
    text = config.filled({"rms_norm_eps": 1e-6, "max_position_embeddings": 32768})
    head_dim = read_head_dim(text)
    theta = read_theta(text, read_rope(text, "default"))
    rope = RopeConfig(theta, (head_dim // 2,), interleaved=False)
    tied = text.flag("tie_word_embeddings")
    return read_text_config(text, rope, head_dim, tied=tied, qkv_bias=True)


def read_vision(config: Section, out: int) -> DotsConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    vision = config.section("vision_config")
    check_channels(vision)
    refuse_flags(vision, "is_causal")
    hidden = vision.count("embed_dim", default=1536)
    heads = vision.count("num_attention_heads", default=12)
    check_halves(vision, "embed_dim", hidden, heads)
    if (found := vision.count("hidden_size", default=1536)) != out:
        raise CheckpointError(
            f"{vision.where}: hidden_size {found} must be the language model's {out}"
        )
    return DotsConfig(
        depth=vision.layers("num_hidden_layers", default=42),
        hidden=hidden,
        heads=heads,
        intermediate=vision.count("intermediate_size", default=4224),
        activation="silu",
        norm_eps=vision.number("rms_norm_eps", default=1e-5),
        patch=vision.count("patch_size", default=14),
        merge=vision.count("spatial_merge_size", default=2),
        bias=vision.flag("use_bias"),
        last_norm=vision.flag("post_norm", default=True),
        out_hidden=out,
    )
