"""dots.ocr."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.dots_ocr.spec:dots_spec",
    model="saccade.families.dots_ocr.net:DotsModel",
    architectures=("DotsOCRForCausalLM",),
    model_types=("dots_ocr",),
    gguf="saccade.families.dots_ocr.gguf:FACTS",
)
