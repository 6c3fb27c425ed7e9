"""GLM-OCR."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.qwen_vl.glm_ocr.spec:glm_spec",
    model="saccade.families.qwen_vl.glm_ocr.net:GlmModel",
    architectures=("GlmOcrForConditionalGeneration",),
    model_types=("glm_ocr",),
)
