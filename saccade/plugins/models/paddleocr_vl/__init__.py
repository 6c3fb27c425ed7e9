"""The family of PaddleOCR-VL."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.paddleocr_vl.spec:paddle_spec",
    model="saccade.plugins.models.paddleocr_vl.net:PaddleModel",
    architectures=("PaddleOCRVLForConditionalGeneration",),
    model_types=("paddleocr_vl",),
)
