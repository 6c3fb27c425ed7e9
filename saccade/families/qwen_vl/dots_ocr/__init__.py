"""dots.ocr."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.qwen_vl.dots_ocr.spec:dots_spec",
    model="saccade.families.qwen_vl.dots_ocr.net:DotsModel",
    architectures=("DotsOCRForCausalLM",),
    model_types=("dots_ocr",),
    gguf="saccade.families.qwen_vl.dots_ocr.gguf:FACTS",
)
