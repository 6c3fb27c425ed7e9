"""Lists the architectures whose tokens tests compare with transformers' own `generate`.
`docs/models.md` has the same list.
"""

from __future__ import annotations

PROVEN = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MinistralForCausalLM",
        "Ministral3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "Phi3ForCausalLM",
        "SmolLM3ForCausalLM",
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "Exaone4ForCausalLM",
        "Gemma2ForCausalLM",
        "GraniteForCausalLM",
        "LlavaOnevisionForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm46VForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "DeepseekVLForConditionalGeneration",
        "DeepseekVLHybridForConditionalGeneration",
        "DeepseekOcr2ForConditionalGeneration",
        "AyaVisionForConditionalGeneration",
        "Cohere2VisionForConditionalGeneration",
        "Phi4MultimodalForCausalLM",
        "CohereCompassForConditionalGeneration",
        "Ovis2ForConditionalGeneration",
        "Granite4VisionForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
    }
)
