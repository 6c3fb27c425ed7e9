"""The family of HunyuanOCR."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.hunyuan_vl.spec:hunyuan_spec",
    model="saccade.plugins.models.hunyuan_vl.net:HunyuanModel",
    architectures=("HunYuanVLForConditionalGeneration",),
    model_types=("hunyuan_vl",),
)
