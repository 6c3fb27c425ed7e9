"""A Qwen-VL checkpoint's network, and what its tensors are called."""

from __future__ import annotations

import re

from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.families.qwen_vl.text import text_model
from saccade.families.qwen_vl.vision import VisionTower
from saccade.nn.net import TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

HARMLESS = re.compile(r"rotary_emb\.|rotary_pos_emb\.|\.inv_freq$")
"""Buffers that old checkpoints carry and the configuration decides anyway."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\."
    r"((self_attn|mlp|mlp\.experts\.\d+)\.[a-z]+_proj\.weight|mlp\.experts\.[a-z_]+_proj)"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)


def build_tower(spec: QwenVLSpec, weights: Weights, encoder_shard: Shard) -> TowerAlone:
    """The vision tower alone; no other tensor is read. Raises as `build` does."""
    return TowerAlone(spec, _tower(spec, weights, encoder_shard))


def build(spec: QwenVLSpec, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
    """`encoder_shard` is the vision tower's.

    Raises CheckpointError where a tensor is missing or misshapen.
    """
    tower = _tower(spec, weights, encoder_shard)
    return WholeNet(spec, tower, text_model(weights, spec.text, shard))


def _tower(spec: QwenVLSpec, weights: Weights, shard: Shard) -> VisionTower:
    return VisionTower(weights, spec.vision, spec.image_rules, shard, spec.patch_embed)


def canonical_name(name: str) -> str:
    """The name that layers ask for: `visual.*`, `language_model.*`, `lm_head.weight`, whatever the
    file's age calls it.
    """
    name = name.removeprefix("model.")
    if name.startswith(("visual.", "language_model.", "lm_head.")):
        return name.replace("language_model.model.", "language_model.", 1)
    return f"language_model.{name}"


def harmless(name: str, spec: QwenVLSpec) -> bool:
    """Whether a canonical name that no layer asks for may be passed over in silence."""
    return bool(HARMLESS.search(name)) or (spec.text.tied and name == "lm_head.weight")


def projection(name: str) -> bool:
    """Whether a canonical name is that of a matrix of the language model, head included, which may
    be in 8 bits for products. The tower's are not.
    """
    return PROJECTION.fullmatch(name) is not None
