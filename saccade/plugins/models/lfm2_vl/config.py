"""Reads the sizes of LFM2-VL's language model and vision encoder from `config.json`.

Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    SiglipDefaults,
    read_head_dim,
    read_layer_types,
    read_rope,
    read_text_config,
    read_theta,
    refuse_flags,
    require_kind,
    siglip_shape,
)
from saccade.nn.shapes import RopeConfig, SiglipConfig, TextConfig

FULL, CONVOLUTION = "full_attention", "conv"
SIGLIP = SiglipDefaults(hidden=768, heads=12, side=256, patch=16)


@dataclass(frozen=True, slots=True)
class ConvolutionConfig:
    """Lists the layers that have attention. The others are convolutions over a token and the `taps
    - 1` tokens before it.
    """

    full: tuple[bool, ...]
    taps: int


@dataclass(frozen=True, slots=True)
class ProjectorConfig:
    """The sizes of the MLP that projects the vision encoder's output."""

    hidden: int
    activation: str
    normed: bool
    bias: bool


def read_text(config: Section, text: Section) -> tuple[TextConfig, ConvolutionConfig]:
    """Read the sizes of the language model and of its short convolutions. Raises
    CheckpointError.
    """
    require_kind(text, "lfm2")
    refuse_flags(text, "conv_bias")
    eps = text.number("norm_eps", default=1e-5)
    usual = {"intermediate_size": 12288, "rms_norm_eps": eps, "max_position_embeddings": 128_000}
    text = text.filled(usual)
    head_dim = read_head_dim(text)
    theta = read_theta(text, read_rope(text, "default"))
    tied = config.flag("tie_embedding", default=config.flag("tie_word_embeddings", default=True))
    rope = RopeConfig(theta, (head_dim // 2,), interleaved=False)
    model = read_text_config(text, rope, head_dim, tied=tied, qk_norm=True)
    taps = text.integer("conv_L_cache", default=3)
    if taps < 2:
        raise CheckpointError(f"{text.where}: conv_L_cache must be at least 2")
    full = _layers(text, model.layers)
    return replace(model, intermediate=_width(text)), ConvolutionConfig(full, taps)


def _layers(text: Section, count: int) -> tuple[bool, ...]:
    names = read_layer_types(text, count, (FULL, CONVOLUTION))
    listed = text.integers("full_attn_idxs", default=tuple(range(count)))
    full = tuple(name == FULL for name in names) or tuple(at in listed for at in range(count))
    if not any(full):
        raise CheckpointError(f"{text.where}: no layer has {FULL}, which is not supported")
    return full


def _width(text: Section) -> int:
    """Return the width of an MLP as transformers' `Lfm2MLP` computes it."""
    width = text.integer("block_ff_dim", default=text.integer("intermediate_size"))
    if not text.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiple = text.count("block_multiple_of", default=256)
    width = int(text.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


def read_vision(config: Section, out: int) -> tuple[SiglipConfig, ProjectorConfig]:
    """Read the sizes of the vision encoder and the projector. Raises CheckpointError.

    out: the number of values per embedding. In the result, `side` is the edge in pixels of an image
    that has the learned positions' native size.
    """
    vision = config.section("vision_config")
    require_kind(vision, "siglip2_vision_model")
    patch = vision.count("patch_size", default=SIGLIP.patch)
    places = vision.count("num_patches", default=256)
    across = math.isqrt(places)
    if across**2 != places:
        raise CheckpointError(f"{vision.where}: num_patches {places} is not a square number")
    merge = config.count("downsample_factor", default=2)
    tower = siglip_shape(vision, across * patch, patch, merge, out, SIGLIP)
    projector = ProjectorConfig(
        config.count("projector_hidden_size", default=2560),
        config.text("projector_hidden_act", default="gelu"),
        config.flag("projector_use_layernorm", default=True),
        config.flag("projector_bias", default=True),
    )
    return tower, projector
