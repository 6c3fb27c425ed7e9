"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense and with experts, and Qwen3.5, with Qwen3-VL's tower or
without any.
"""

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
QWEN3_5 = Family(
    spec="saccade.families.qwen_vl.qwen3_5_spec:qwen3_5_spec",
    model="saccade.families.qwen_vl.qwen3_5_net:Qwen35Model",
    architectures=(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ),
    model_types=("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
)
