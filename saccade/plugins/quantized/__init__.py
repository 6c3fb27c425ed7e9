"""Loads quantized checkpoints in safetensors: FP8, compressed-tensors, AWQ and GPTQ, with 8 bits or
fewer.
"""

from saccade.plugin import Checkpoints, Offer, Plugin

PLUGIN = Plugin(
    "quantized",
    options="saccade.core.settings:QuantizationSettings",
    checkpoints=Checkpoints(
        quantization="saccade.plugins.quantized.quantization:read_quantization",
        stored_forms=Offer(
            "saccade.plugins.quantized.forms:read_forms",
            "saccade.families.checkpoint:mentions_quantization",
        ),
    ),
)
