"""SmolVLM and Idefics3."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.smolvlm.spec:smolvlm_spec",
    model="saccade.families.smolvlm.net:SmolVLMModel",
    architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    model_types=("idefics3", "smolvlm"),
    gguf="saccade.families.smolvlm.gguf:FACTS",
)
