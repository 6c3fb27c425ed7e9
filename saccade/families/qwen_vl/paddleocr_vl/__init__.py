"""PaddleOCR-VL."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.qwen_vl.paddleocr_vl.spec:paddle_spec",
    model="saccade.families.qwen_vl.paddleocr_vl.net:PaddleModel",
    architectures=("PaddleOCRVLForConditionalGeneration",),
    model_types=("paddleocr_vl",),
)
