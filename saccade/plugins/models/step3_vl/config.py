"""Reads the sizes of Step3-VL's language model and vision encoder from `config.json`.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    check_channels,
    check_halves,
    check_side,
    read_axial,
    read_head_dim,
    read_rope,
    read_text_config,
    read_theta,
    refuse_unsupported,
    require_kind,
)
from saccade.nn.shapes import BlocksConfig, RopeConfig, TextConfig

REDUCTION = 4
"""The edge, in patches, of the square that becomes one token. Each of the two convolutions after
the encoder halves it.
"""
ALWAYS = {"use_ln_pre": True, "use_ln_post": False, "use_abs_posemb": True, "use_rope2d": True}
NEVER = ("use_cls_token", "ues_cls_token")
"""Fields that must be false. The second name is a misspelling in the Hub's file."""


@dataclass(frozen=True, slots=True)
class PerceptionConfig(BlocksConfig):
    """The sizes of the perception encoder, which encodes each view separately, and of its
    projector.

    side: the edge, in pixels, of an image that has the learned positions' native size.
    """

    theta: float
    side: int
    patch: int
    projector_bias: bool
    out_hidden: int

    @property
    def unit(self) -> int:
        """The edge, in pixels, of the square that becomes one token."""
        return self.patch * REDUCTION


def read_vision(config: Section, out: int) -> PerceptionConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    vision = config.section("vision_config")
    for name, needed in (*ALWAYS.items(), *((name, False) for name in NEVER)):
        if vision.flag(name, default=needed) != needed:
            raise CheckpointError(f"{vision.where}: {name} must be {str(needed).lower()}")
    if config.integer("understand_projector_stride", default=2) != 2:
        raise CheckpointError(f"{config.where}: understand_projector_stride must be 2")
    check_channels(vision)
    hidden = vision.count("width", "hidden_size", default=1536)
    heads = vision.count("heads", "num_attention_heads", default=16)
    check_halves(vision, "width", hidden, heads)
    ratio = vision.positive("mlp_ratio", default=8960 / 1536)
    side, patch = vision.count("image_size", default=728), vision.count("patch_size", default=14)
    check_side(vision, side, patch, REDUCTION)
    rope = read_axial(vision)
    return PerceptionConfig(
        depth=vision.layers("layers", "num_hidden_layers", default=47),
        hidden=hidden,
        heads=heads,
        intermediate=int(hidden * ratio),
        activation=vision.text("hidden_act", default="quick_gelu"),
        norm_eps=vision.number("layer_norm_eps", default=1e-5),
        theta=rope.positive("rope_theta", default=1e4),
        side=side,
        patch=patch,
        projector_bias=config.flag("projector_bias"),
        out_hidden=out,
    )


def read_text(config: Section, text: Section) -> TextConfig:
    """Read the sizes and options of the language model, a Qwen3. Raises CheckpointError."""
    require_kind(text.filled({"model_type": "qwen3"}), "qwen3")
    refuse_unsupported(text, "use_sliding_window", "attention_bias")
    text = text.filled({"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128})
    head_dim = read_head_dim(text)
    rope = RopeConfig(read_theta(text, read_rope(text)), (head_dim // 2,), interleaved=False)
    tied = config.flag("tie_word_embeddings", default=text.flag("tie_word_embeddings"))
    return read_text_config(text, rope, head_dim, tied=tied, qk_norm=True)
