"""The network of Qwen3.5, and the names of its tensors. The vision encoder is Qwen3-VL's."""

from __future__ import annotations

from dataclasses import replace

from saccade.families.qwen_vl.net import QwenVLModel
from saccade.nn.decoder import Decoder
from saccade.nn.family_model import FullNet, language_matrices
from saccade.nn.protocol import LanguageModel
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.hybrid_decoder import hybrid_model
from saccade.plugins.models.qwen3_5.head import NAME, MultiTokenHead
from saccade.plugins.models.qwen3_5.spec import Qwen35Spec

LAYER = (
    r"((self_attn|mlp|mlp\.shared_expert|mlp\.experts\.\d+)\.[a-z]+_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))\.weight|mlp\.experts\.[a-z_]+_proj"
)


class Qwen35Model(QwenVLModel):
    """Builds the network, with the MTP head if the option `mtp` is on."""

    spec: Qwen35Spec

    quantisable = language_matrices(LAYER, rf"mtp\.layers\.\d+\.({LAYER})", r"mtp\.fc\.weight")
    unused = (f"{NAME}.",)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return hybrid_model(weights, self.spec.text, self.spec.hybrid, shard)

    def build(self, weights: Weights, shard: Shard, encoder_shard: Shard) -> FullNet:
        net, spec = super().build(weights, shard, encoder_shard), self.spec
        if not spec.drafts:
            return net
        assert isinstance(net.text, Decoder), "made by `text`"
        head = MultiTokenHead(weights, spec.text, spec.hybrid, shard, net.text)
        return replace(net, head=head)
