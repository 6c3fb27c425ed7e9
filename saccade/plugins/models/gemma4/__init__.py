"""The family of Gemma 4, with a vision encoder, with an embedder, or text-only."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.gemma4.spec:gemma4_spec",
    model="saccade.plugins.models.gemma4.net:Gemma4Model",
    architectures=(
        "Gemma4ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
    ),
    model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    gguf="saccade.plugins.models.gemma4.gguf:FACTS",
)
