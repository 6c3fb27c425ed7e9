"""Qwen3.5, dense and with experts, with Qwen3-VL's tower or without any."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.qwen_vl.qwen3_5.spec:qwen3_5_spec",
    model="saccade.families.qwen_vl.qwen3_5.net:Qwen35Model",
    architectures=(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ),
    model_types=("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
)
