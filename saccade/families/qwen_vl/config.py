"""Reads the sizes of Qwen-VL's language model and vision encoder from `config.json`.

Files of older transformers versions have the language model's fields at the top level, `rope_theta`
and `rope_scaling`. Newer ones have `text_config` and `rope_parameters`. Runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    EXPERT_COUNTS,
    experts_config,
    read_axes,
    read_head_dim,
    read_rope,
    read_text_config,
    refuse_unsupported,
    rope_section,
)
from saccade.nn.shapes import BlocksConfig, RopeConfig, TextConfig

Variant = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
VARIANTS: dict[str, Variant] = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
}
"""The variant by config.json's model_type."""
PatchEmbedding = Literal["auto", "exact", "folded"]
"""How the vision encoder normalizes pixels. "exact" normalizes them before the first layer.
"folded" folds the normalization into that layer's weights. "auto" is folded on a CPU with compiled
bfloat16 kernels, otherwise exact.
"""


@dataclass(frozen=True, slots=True)
class VisionConfig(BlocksConfig):
    """The sizes of Qwen-VL's vision encoder, and which layers use windows or deepstack."""

    variant: Variant
    out_hidden: int
    # patches
    patch: int
    merge: int
    temporal_patch: int
    # attention and positions
    rope_theta: float
    window: int = 0  # side of an attention window in pixels; 0 for full attention in all layers
    full_attention_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    position_side: int = 0  # side of the grid of learned positions; 0 if there are none


NORM_EPS = 1e-6
NO_VISION = VisionConfig(0, 0, 0, 0, "silu", NORM_EPS, "qwen3_vl", 0, 1, 1, 1, 1.0)
"""The config of a checkpoint without a vision encoder."""


def read_variant(config: Section) -> Variant:
    """Return which variant of Qwen-VL the model is. Raises CheckpointError."""
    model_type = config.text("model_type")
    if (variant := VARIANTS.get(model_type)) is not None:
        return variant
    raise CheckpointError(f"{config.where}: model_type {model_type!r} is not a Qwen-VL model")


def read_vision(variant: Variant, config: Section, vision: Section, out: int) -> VisionConfig:
    """Read the sizes of the vision encoder. Raises CheckpointError.

    out: the hidden size of the language model, which must be the size of the encoder's outputs.
    """
    first = variant == "qwen2_vl"
    # In Qwen2-VL, the vision encoder's hidden size is `embed_dim`, and `hidden_size` is the
    # language model's.
    hidden = vision.count("embed_dim", default=1280) if first else vision.count("hidden_size")
    heads = vision.count("num_heads", "num_attention_heads", default=16)
    if hidden % heads or hidden // heads % 4:
        raise CheckpointError(
            f"{vision.where}: {hidden} values in {heads} heads: the size of a head must be a "
            "multiple of 4"
        )
    positions = (
        vision.integer("num_position_embeddings", default=2304) if variant == "qwen3_vl" else 0
    )
    depth = vision.layers("depth", "num_hidden_layers")
    deepstack = (
        vision.integers("deepstack_visual_indexes", default=(8, 16, 24))
        if variant == "qwen3_vl"
        else ()
    )
    if any(not 0 <= layer < depth for layer in deepstack):
        raise CheckpointError(
            f"{vision.where}: deepstack_visual_indexes {list(deepstack)} are not among its "
            f"{depth} layers"
        )
    tower = VisionConfig(
        variant=variant,
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=int(hidden * vision.number("mlp_ratio", default=4.0))
        if first
        else vision.integer("intermediate_size"),
        out_hidden=vision.count("hidden_size") if first else vision.count("out_hidden_size"),
        activation=vision.text(
            "hidden_act",
            default={"qwen2_vl": "quick_gelu", "qwen2_5_vl": "silu"}.get(
                variant, "gelu_pytorch_tanh"
            ),
        ),
        norm_eps=NORM_EPS,
        patch=vision.integer(
            "patch_size", "spatial_patch_size", default=16 if variant == "qwen3_vl" else 14
        ),
        merge=vision.integer("spatial_merge_size", default=2),
        temporal_patch=vision.integer("temporal_patch_size", default=2),
        rope_theta=rope_section(vision).positive("rope_theta", default=10000.0),
        window=vision.integer("window_size", default=112) if variant == "qwen2_5_vl" else 0,
        full_attention_layers=vision.integers("fullatt_block_indexes", default=(7, 15, 23, 31))
        if variant == "qwen2_5_vl"
        else (),
        deepstack_layers=deepstack,
        position_side=int(positions**0.5),
    )
    if tower.out_hidden != out:
        raise CheckpointError(
            f"{config.where}: the vision encoder's output has {tower.out_hidden} values, but the "
            f"language model expects {out}"
        )
    return tower


def read_text(variant: Variant, config: Section, text: Section) -> TextConfig:
    """Read the sizes of the language model. Raises CheckpointError."""
    refuse_unsupported(text, "use_sliding_window", "attention_bias")
    third = variant == "qwen3_vl"
    text = text.filled({"rms_norm_eps": 1e-6, "head_dim": 128} if third else {"rms_norm_eps": 1e-5})
    head_dim = read_head_dim(text)
    return read_text_config(
        text,
        _rope(variant, text, head_dim),
        head_dim,
        # Some Qwen2 checkpoints saved before transformers 5 set it only in the text section.
        tied=config.flag("tie_word_embeddings") or (not third and text.flag("tie_word_embeddings")),
        qkv_bias=not third,
        qk_norm=third,
        experts=experts_config(text) if any(map(text.has, EXPERT_COUNTS)) else None,
    )


def _rope(variant: Variant, text: Section, head_dim: int) -> RopeConfig:
    rope, third = read_rope(text), variant == "qwen3_vl"
    theta = rope.positive(
        "rope_theta", default=text.positive("rope_theta", default=5e5 if third else 1e6)
    )
    usual = (24, 20, 20) if third else (16, 24, 24)
    return RopeConfig(theta, read_axes(rope, head_dim, usual), interleaved=third)
