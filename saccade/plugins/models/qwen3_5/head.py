"""Qwen3.5's MTP head (multi-token prediction), which drafts tokens for speculative decoding.

It is an attention layer after the language model. It predicts the token after next from a hidden
state and the next token. transformers has no such module, so this one follows the names of the
published weights and vLLM's `qwen3_5_mtp.py`.
"""

from __future__ import annotations

import torch

from saccade.kernels.reference.rotary import Rotation
from saccade.nn.decoder import Decoder
from saccade.nn.linear import Linear
from saccade.nn.norm import RMSNorm
from saccade.nn.protocol import Attention, Batch
from saccade.nn.shapes import TextConfig
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.hybrid_config import HybridConfig
from saccade.plugins.models.kit.hybrid_decoder import GatedAttention, GatedDelta, hybrid_layer

NAME = "mtp"


class MultiTokenHead:
    """Drafts the token after next. It shares the language model's token embedding, rotary tables
    and output head.

    Implements `nn.protocol.DraftHead`.
    """

    __slots__ = ("fuse", "layer", "norm", "state_norm", "text", "token_norm")

    def __init__(
        self,
        weights: Weights,
        config: TextConfig,
        hybrid: HybridConfig,
        shard: Shard,
        text: Decoder[GatedAttention | GatedDelta],
    ) -> None:
        def norm(part: str) -> RMSNorm:
            sizes = (config.hidden, config.rms_eps)
            return RMSNorm(weights, f"{NAME}.{part}", *sizes, around_one=True)

        self.text = text
        self.token_norm, self.state_norm = norm("pre_fc_norm_embedding"), norm("pre_fc_norm_hidden")
        fuse = Part(f"{NAME}.fc.weight", (config.hidden, 2 * config.hidden))
        self.fuse = Linear(weights.ops, weights.load_matrix(fuse))
        name = f"{NAME}.layers.0"
        self.layer = hybrid_layer(weights, config.layers, config, hybrid, shard, name)
        self.norm = norm("norm")

    def __call__(self, batch: Batch, states: torch.Tensor, attention: Attention) -> torch.Tensor:
        x = self.text.embedding(batch.tokens)
        if batch.splice_rows.shape[0]:
            x.index_copy_(0, batch.splice_rows, batch.embeddings)
        x = self.fuse(torch.cat((self.token_norm(x), self.state_norm(states)), dim=1))
        rotation: Rotation = self.text.rope(batch.positions)
        return self.norm.add_norm(*self.layer(x, None, rotation, attention))[1]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.text.head(states).float()
