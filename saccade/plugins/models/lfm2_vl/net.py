"""Builds LFM2-VL's network, and maps tensor names to canonical ones.

A layer has attention or a gated convolution over the last few tokens. The cache stores the
convolution's last inputs as one state per sequence.
"""

from __future__ import annotations

import torch

from saccade.kernels.matrix import Rows
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.attention import CausalAttention, HeadsConfig
from saccade.nn.decoder import plain_decoder
from saccade.nn.family_model import DENSE_LAYER, FamilyModel, language_matrices
from saccade.nn.linear import Linear, RowLinear, share
from saccade.nn.protocol import Attention, LanguageModel, VisionNet
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.lfm2_vl.spec import Lfm2Spec
from saccade.plugins.models.lfm2_vl.vision import Siglip2Tower


class ShortConvolution:
    """Convolves each channel over the last few tokens, with gates before and after."""

    __slots__ = ("group", "layer", "out", "taps", "wide")

    def __init__(
        self, weights: Weights, name: str, hidden: int, taps: int, shard: Shard, layer: int
    ) -> None:
        self.layer = layer
        what = "convolution channels"
        cuts = [share(shard, part * hidden, hidden, what) for part in range(3)]
        parts = [Part(f"{name}.in_proj.weight", (3 * hidden, hidden), (cut,)) for cut in cuts]
        added = weights.adapters.product(parts)
        self.wide = Linear(weights.ops, weights.load_matrix(*parts), low_rank=added)
        self.group = self.wide.group
        kernel = Part(f"{name}.conv.weight", (hidden, 1, taps), (cuts[0],))
        self.taps = weights.load(kernel).squeeze(1).t().contiguous()  # [K, C]
        self.out = RowLinear(weights, f"{name}.out_proj", hidden, hidden, shard, bias=False)

    def __call__(self, x: Rows, _: Rotation, attention: Attention) -> torch.Tensor:
        """Map x [T, hidden] to [T, hidden]. Positions are not used."""
        before, after, values = self.wide(x).chunk(3, dim=1)
        mixed = attention.recurrence.convolve(before * values, self.taps, self.layer)
        return self.out(after * mixed)


class Lfm2Model(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_model.*`,
    `multi_modal_projector.*`, `language_model.*` and `lm_head.weight`. Within layers, they are the
    names in `nn/decoder.py`.
    """

    spec: Lfm2Spec

    names = (
        (r"^model\.", ""),
        (r"^vision_tower\.(vision_model\.)?", "vision_model."),
        (r"^(language_model\.layers\.\d+)\.operator_norm\.", r"\1.input_layernorm."),
        (r"^(language_model\.layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
        (r"^(language_model\.layers\.\d+\.self_attn)\.out_proj\.", r"\1.o_proj."),
        (r"^(language_model\.layers\.\d+\.self_attn)\.([qk])_layernorm\.", r"\1.\2_norm."),
        (r"^(language_model\.layers\.\d+)\.feed_forward\.w1\.", r"\1.mlp.gate_proj."),
        (r"^(language_model\.layers\.\d+)\.feed_forward\.w3\.", r"\1.mlp.up_proj."),
        (r"^(language_model\.layers\.\d+)\.feed_forward\.w2\.", r"\1.mlp.down_proj."),
        (r"^language_model\.embedding_norm\.", "language_model.norm."),
    )
    quantisable = language_matrices(rf"{DENSE_LAYER}|conv\.(in|out)_proj\.weight")
    unused = ("vision_model.head.",)  # SigLIP's pooling head

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        spec = self.spec
        return Siglip2Tower(weights, spec.vision, spec.images, spec.projector, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        config, convolutions = self.spec.text, self.spec.convolutions
        heads = HeadsConfig.of(config)

        def mixer(layer: int, name: str) -> CausalAttention | ShortConvolution:
            if convolutions.full[layer]:
                return CausalAttention(weights, f"{name}.self_attn", heads, shard, layer)
            taps = convolutions.taps
            return ShortConvolution(weights, f"{name}.conv", config.hidden, taps, shard, layer)

        return plain_decoder(weights, config, shard, mixer)
