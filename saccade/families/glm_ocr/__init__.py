"""GLM-OCR."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.glm_ocr.spec:glm_spec",
    model="saccade.families.glm_ocr.net:GlmModel",
    architectures=("GlmOcrForConditionalGeneration",),
    model_types=("glm_ocr",),
)
