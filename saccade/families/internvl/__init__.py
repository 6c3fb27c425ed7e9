"""InternVL 2.5, 3 and 3.5, and Qianfan-OCR."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.internvl.spec:internvl_spec",
    model="saccade.families.internvl.net:InternVLModel",
    architectures=("InternVLForConditionalGeneration", "QianfanOCRForConditionalGeneration"),
    model_types=("internvl", "qianfan_ocr"),
    gguf="saccade.families.internvl.gguf:FACTS",
)
