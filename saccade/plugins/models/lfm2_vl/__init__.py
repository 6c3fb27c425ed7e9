"""The family of LFM2-VL and LFM2.5-VL."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.lfm2_vl.spec:lfm2_spec",
    model="saccade.plugins.models.lfm2_vl.net:Lfm2Model",
    architectures=("Lfm2VlForConditionalGeneration",),
    model_types=("lfm2_vl",),
    gguf="saccade.plugins.models.lfm2_vl.gguf:FACTS",
)
