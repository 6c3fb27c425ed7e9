"""The family of Qwen3.5, with Qwen3-VL's vision encoder or text-only."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.qwen3_5.spec:qwen3_5_spec",
    model="saccade.plugins.models.qwen3_5.net:Qwen35Model",
    architectures=(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ),
    model_types=("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
)
