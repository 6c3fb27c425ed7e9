"""PaddleOCR-VL."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.paddleocr_vl.spec:paddle_spec",
    model="saccade.families.paddleocr_vl.net:PaddleModel",
    architectures=("PaddleOCRVLForConditionalGeneration",),
    model_types=("paddleocr_vl",),
)
