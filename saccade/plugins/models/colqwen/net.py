"""ColQwen's network: Qwen-VL's network, followed by a projection of each token's state to a vector
of length 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from saccade.families.qwen_vl.net import QwenVLModel
from saccade.nn.family_model import FullNet
from saccade.nn.linear import Column, Linear
from saccade.nn.low_rank import LANGUAGE
from saccade.nn.weights import Weights
from saccade.parallel import UNSHARDED, Shard

PROJECTION = f"{LANGUAGE}custom_text_proj"
"""The projection's canonical name. It counts as the language model's, which adapters may change
without a change to the embeddings of images.
"""


class Projection:
    """Projects each token's state to a vector of length 1. Replicated on every rank.

    Implements `nn.protocol.TokenVectors`.
    """

    __slots__ = ("linear",)

    def __init__(self, weights: Weights, hidden: int, width: int) -> None:
        column = Column(PROJECTION, width, UNSHARDED)
        self.linear = Linear.columns(weights, [column], hidden, bias=True)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.linear(states).float(), dim=-1)


class ColQwenModel(QwenVLModel):
    """Builds the network. Tensors have the same names as Qwen-VL's, with the prefix `vlm.` in
    transformers' files.
    """

    names = (
        (r"^vlm\.", ""),
        (r"^embedding_proj_layer\.", f"{PROJECTION}."),
        *QwenVLModel.names,
    )

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> FullNet:
        net, late = super().build(weights, shard, encoder_shard), self.spec.templates.late
        assert late is not None, "the family's spec has it"
        return replace(net, vectors=Projection(weights, self.spec.text.hidden, late.width))
