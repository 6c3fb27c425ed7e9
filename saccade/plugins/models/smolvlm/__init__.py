"""The family of SmolVLM and Idefics3."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.smolvlm.spec:smolvlm_spec",
    model="saccade.plugins.models.smolvlm.net:SmolVLMModel",
    architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    model_types=("idefics3", "smolvlm"),
    gguf="saccade.plugins.models.smolvlm.gguf:FACTS",
)
