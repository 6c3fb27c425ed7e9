"""A Qwen3.5 checkpoint's network, and what its tensors are called. The vision tower is
Qwen3-VL's.
"""

from __future__ import annotations

import re

from saccade.families.qwen3_5.spec import Qwen35Spec
from saccade.families.qwen3_5.text import hybrid_model
from saccade.families.qwen_vl import net as qwen_vl
from saccade.nn.net import NoVision, TowerAlone, WholeNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard

DRAFTING = "mtp."
"""Heads that draft several tokens at a time, which nothing here uses."""
PROJECTION = re.compile(
    r"language_model\.layers\.\d+\."
    r"(((self_attn|mlp|mlp\.shared_expert|mlp\.experts\.\d+)\.[a-z]+_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))\.weight|mlp\.experts\.[a-z_]+_proj)"
    r"|language_model\.embed_tokens\.weight|lm_head\.weight"
)


def build(spec: Qwen35Spec, weights: Weights, shard: Shard, encoder_shard: Shard) -> WholeNet:
    """`encoder_shard` is the vision tower's.

    Raises CheckpointError where a tensor is missing or misshapen.
    """
    tower = build_tower(spec, weights, encoder_shard).vision if spec.sees_images else NoVision()
    return WholeNet(spec, tower, hybrid_model(weights, spec.text, spec.hybrid, shard))


def build_tower(spec: Qwen35Spec, weights: Weights, encoder_shard: Shard) -> TowerAlone:
    """The vision tower alone, which is Qwen3-VL's."""
    return qwen_vl.build_tower(spec, weights, encoder_shard)


def canonical_name(name: str) -> str:
    """Qwen-VL's; heads that draft keep theirs."""
    return name if name.startswith(DRAFTING) else qwen_vl.canonical_name(name)


def harmless(name: str, spec: Qwen35Spec) -> bool:
    """Whether a canonical name that no layer asks for may be passed over in silence."""
    return (
        name.startswith(DRAFTING if spec.sees_images else (DRAFTING, "visual."))
        or bool(qwen_vl.HARMLESS.search(name))
        or (spec.text.tied and name == "lm_head.weight")
    )


def projection(name: str) -> bool:
    """Whether a canonical name is that of a matrix of the language model, head included, which may
    be in 8 bits for products.
    """
    return PROJECTION.fullmatch(name) is not None
