"""The family of Step3-VL-10B."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.step3_vl.spec:step3_vl_spec",
    model="saccade.plugins.models.step3_vl.net:Step3VLModel",
    architectures=("StepVLForConditionalGeneration",),
    model_types=("step3_vl",),
    pixels="saccade.plugins.models.step3_vl.pixels",
)
