"""Kimi-VL."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.kimi_vl.spec:kimi_spec",
    model="saccade.families.kimi_vl.net:KimiModel",
    architectures=("KimiVLForConditionalGeneration",),
    model_types=("kimi_vl",),
)
