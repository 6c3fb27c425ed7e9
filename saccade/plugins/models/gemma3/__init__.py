"""The family of Gemma 3, with or without a vision encoder."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.gemma3.spec:gemma3_spec",
    model="saccade.plugins.models.gemma3.net:Gemma3Model",
    architectures=("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    model_types=("gemma3", "gemma3_text"),
    gguf="saccade.plugins.models.gemma3.gguf:FACTS",
)
