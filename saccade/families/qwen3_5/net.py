"""The network of a Qwen3.5 checkpoint: Qwen3-VL's vision tower and a hybrid language model behind
`nn.protocol.FamilyNet`.
"""

from __future__ import annotations

import re

import torch

from saccade.families.qwen3_5.spec import Qwen35Spec
from saccade.families.qwen3_5.text import HybridModel
from saccade.families.qwen_vl import net as qwen_vl
from saccade.families.qwen_vl.vision import VisionTower
from saccade.nn.protocol import Attention, Batch
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


class Qwen35Net:
    """Implements `FamilyNet`."""

    def __init__(
        self, spec: Qwen35Spec, weights: Weights, shard: Shard, encoder_shard: Shard
    ) -> None:
        self.spec = spec
        self.vision = VisionTower(
            weights, spec.vision, spec.image_rules, encoder_shard, spec.patch_embed
        )
        self.text = HybridModel(weights, spec.text, spec.hybrid, shard)

    @property
    def hidden(self) -> int:
        return self.text.config.hidden

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        return self.text(batch, attention)

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.text.logits(states)


def build(spec: Qwen35Spec, weights: Weights, shard: Shard, encoder_shard: Shard) -> Qwen35Net:
    """`encoder_shard` is the vision tower's.

    Raises CheckpointError where a tensor is missing or misshapen.
    """
    return Qwen35Net(spec, weights, shard, encoder_shard)


def build_tower(spec: Qwen35Spec, weights: Weights, encoder_shard: Shard) -> qwen_vl.QwenVLTower:
    """The vision tower alone, which is Qwen3-VL's."""
    return qwen_vl.build_tower(spec, weights, encoder_shard)


def canonical_name(name: str) -> str:
    """Qwen-VL's; heads that draft keep theirs."""
    return name if name.startswith(DRAFTING) else qwen_vl.canonical_name(name)


def harmless(name: str, spec: Qwen35Spec) -> bool:
    """Whether a canonical name that no layer asks for may be passed over in silence."""
    return (
        name.startswith(DRAFTING)
        or bool(qwen_vl.HARMLESS.search(name))
        or (spec.text.tied and name == "lm_head.weight")
    )


def projection(name: str) -> bool:
    """Whether a canonical name is that of a matrix of the language model, head included, which may
    be in 8 bits for products.
    """
    return PROJECTION.fullmatch(name) is not None
