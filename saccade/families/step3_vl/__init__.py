"""Step3-VL-10B."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.step3_vl.spec:step3_vl_spec",
    model="saccade.families.step3_vl.net:Step3VLModel",
    architectures=("StepVLForConditionalGeneration",),
    model_types=("step3_vl",),
)
