"""HunyuanOCR."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.hunyuan_vl.spec:hunyuan_spec",
    model="saccade.families.hunyuan_vl.net:HunyuanModel",
    architectures=("HunYuanVLForConditionalGeneration",),
    model_types=("hunyuan_vl",),
)
