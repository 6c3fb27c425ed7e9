"""The family of Kimi-VL."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.kimi_vl.spec:kimi_spec",
    model="saccade.plugins.models.kimi_vl.net:KimiModel",
    architectures=("KimiVLForConditionalGeneration",),
    model_types=("kimi_vl",),
)
