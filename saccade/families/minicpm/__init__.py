"""MiniCPM-V 4.6."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.minicpm.spec:minicpm_spec",
    model="saccade.families.minicpm.net:MiniCPMModel",
    architectures=("MiniCPMV4_6ForConditionalGeneration",),
    model_types=("minicpmv4_6",),
    gguf="saccade.families.minicpm.gguf:FACTS",
)
