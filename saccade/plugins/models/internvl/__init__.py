"""The family of InternVL 2.5, 3 and 3.5, and Qianfan-OCR."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.internvl.spec:internvl_spec",
    model="saccade.plugins.models.internvl.net:InternVLModel",
    architectures=("InternVLForConditionalGeneration", "QianfanOCRForConditionalGeneration"),
    model_types=("internvl", "qianfan_ocr"),
    gguf="saccade.plugins.models.internvl.gguf:FACTS",
)
