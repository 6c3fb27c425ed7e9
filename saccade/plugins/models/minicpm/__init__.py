"""The family of MiniCPM-V 4.6 and 4.7, and MiniCPM-OCR."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.minicpm.spec:minicpm_spec",
    model="saccade.plugins.models.minicpm.net:MiniCPMModel",
    architectures=(
        "MiniCPMV4_6ForConditionalGeneration",
        "MiniCPMV4_7ForConditionalGeneration",
        "MiniCPMOcrForConditionalGeneration",
    ),
    model_types=("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"),
    gguf="saccade.plugins.models.minicpm.gguf:FACTS",
)
