"""The family of dots.ocr."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.dots_ocr.spec:dots_spec",
    model="saccade.plugins.models.dots_ocr.net:DotsModel",
    architectures=("DotsOCRForCausalLM",),
    model_types=("dots_ocr",),
    gguf="saccade.plugins.models.dots_ocr.gguf:FACTS",
)
