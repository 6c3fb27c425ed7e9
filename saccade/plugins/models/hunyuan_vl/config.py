"""Reads the sizes of HunyuanOCR's language model and vision encoder from `config.json`.

The Hub's file has the language model's fields at the top level. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    check_channels,
    check_heads,
    read_head_dim,
    read_rope,
    read_text_config,
    read_theta,
    refuse_unsupported,
    require_flags,
)
from saccade.nn.shapes import MergedConfig, RopeConfig, TextConfig

ABSENT = {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
"""The values that transformers uses for fields that config.json does not have."""
INTERPOLATIONS = ("bilinear", "bicubic")
OTHER_NAMES = {"head_dim": "attention_head_dim", "vocab_size": "org_vocab_size"}
"""Maps the names of fields to their names in older files."""


@dataclass(frozen=True, slots=True)
class LearnedConfig(MergedConfig):
    """The sizes of the vision encoder and its merger."""

    side: int  # the edge in pixels of an image that has the learned positions' native size
    interpolation: str  # how the learned positions are resized for other images

    @property
    def across(self) -> int:
        """The number of learned positions along an edge."""
        return self.side // self.patch


def read_text(config: Section, text: Section) -> TextConfig:
    """Read the language model's sizes and options from config.json. Raises CheckpointError."""
    refuse_unsupported(text, "attention_bias", "mlp_bias", "use_cla")
    require_flags(text, "use_qk_norm")
    old = {name: text.data[other] for name, other in OTHER_NAMES.items() if text.has(other)}
    text = text.filled(old).filled(ABSENT)
    head_dim = read_head_dim(text)
    tied = config.flag("tie_word_embeddings", default=True) or text.flag(
        "tie_word_embeddings", default=True
    )
    return read_text_config(text, _rope(text, head_dim), head_dim, tied=tied, qk_norm=True)


def _rope(text: Section, head_dim: int) -> RopeConfig:
    """Return the rotary embedding's configuration. A fixed `alpha` scales the base.

    The last three axes are an image token's column, row and image index. Any axes before them are
    the position in the prompt.
    """
    rope = read_rope(text, "default", "xdrope", "dynamic")
    theta = read_theta(text, rope)
    if rope.text("rope_type", "type", default="default") != "default":
        # Without alpha, the base would depend on the prompt's length.
        alpha = rope.positive("alpha")
        if head_dim < 4:
            raise CheckpointError(f"{text.where}: head_dim must be at least 4, not {head_dim}")
        theta *= alpha ** (head_dim / (head_dim - 2))
    sections = rope.numbers("mrope_section", "xdrope_section")
    whole = all(value.is_integer() and value >= 0 for value in sections)
    if not whole or len(sections) < 3 or 2 * sum(sections) != head_dim:
        raise CheckpointError(
            f"{rope.where}: mrope_section {list(sections)} must be at least three integers that "
            f"sum to {head_dim // 2}"
        )
    return RopeConfig(theta, tuple(map(int, sections)), interleaved=False)


def read_vision(config: Section, out: int) -> LearnedConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    vision = config.section("vision_config")
    check_channels(vision)
    if vision.integer("temporal_patch_size", default=1) != 1:
        raise CheckpointError(f"{vision.where}: temporal_patch_size must be 1")
    hidden = vision.count("hidden_size", default=1152)
    heads = vision.count("num_attention_heads", default=16)
    check_heads(vision, hidden, heads)
    if vision.count("num_key_value_heads", default=heads) != heads:
        raise CheckpointError(f"{vision.where}: num_key_value_heads must be {heads}")
    side = vision.count("max_image_size", default=2048)
    patch = vision.count("patch_size", default=16)
    if side < patch:
        raise CheckpointError(
            f"{vision.where}: max_image_size {side} is less than a patch of {patch} pixels"
        )
    mode = vision.text("interpolate_mode", default="bilinear")
    if mode not in INTERPOLATIONS:
        raise CheckpointError(
            f"{vision.where}: interpolate_mode {mode!r} is not supported "
            f"({' and '.join(INTERPOLATIONS)} are)"
        )
    return LearnedConfig(
        depth=vision.layers("num_hidden_layers", default=27),
        hidden=hidden,
        heads=heads,
        intermediate=vision.count("intermediate_size", default=4304),
        activation=vision.text("hidden_act", default="gelu"),
        norm_eps=vision.number("rms_norm_eps", "layer_norm_eps", default=1e-5),
        side=side,
        patch=patch,
        merge=vision.count("spatial_merge_size", default=2),
        interpolation=mode,
        out_hidden=out,
    )
