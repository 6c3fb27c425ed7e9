"""Gemma 3, with or without a tower."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.gemma3.spec:gemma3_spec",
    model="saccade.families.gemma3.net:Gemma3Model",
    architectures=("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    model_types=("gemma3", "gemma3_text"),
    gguf="saccade.families.gemma3.gguf:FACTS",
)
