"""LFM2-VL and LFM2.5-VL."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.lfm2_vl.spec:lfm2_spec",
    model="saccade.families.lfm2_vl.net:Lfm2Model",
    architectures=("Lfm2VlForConditionalGeneration",),
    model_types=("lfm2_vl",),
    gguf="saccade.families.lfm2_vl.gguf:FACTS",
)
