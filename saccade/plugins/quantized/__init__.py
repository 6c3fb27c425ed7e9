"""Checkpoints whose safetensors have matrices in 8 bits or fewer: FP8, compressed-tensors, AWQ,
GPTQ.
"""

from saccade.plugin import Offer, Plugin

PLUGIN = Plugin(
    "quantized",
    options="saccade.core.settings:QuantizationSettings",
    quantization="saccade.plugins.quantized.quantization:read_quantization",
    stored_forms=Offer(
        "saccade.plugins.quantized.forms:read_forms",
        "saccade.families.checkpoint:mentions_quantization",
    ),
)
