"""The family of DeepSeek-VL2, and of DeepSeek-V2, which has no vision encoder."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.deepseek_vl2.spec:deepseek_spec",
    model="saccade.plugins.models.deepseek_vl2.net:DeepseekModel",
    architectures=("DeepseekVLV2ForCausalLM", "DeepseekV2ForCausalLM"),
    model_types=("deepseek_vl_v2", "deepseek_v2"),
)
