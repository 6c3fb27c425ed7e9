"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense and with experts."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.families.qwen_vl.spec:qwen_vl_spec",
    model="saccade.families.qwen_vl.net:QwenVLModel",
    architectures=(
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    ),
    model_types=("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
)
