"""The family of GLM-OCR."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.glm_ocr.spec:glm_spec",
    model="saccade.plugins.models.glm_ocr.net:GlmModel",
    architectures=("GlmOcrForConditionalGeneration",),
    model_types=("glm_ocr",),
)
