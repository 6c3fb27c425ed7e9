"""Every other architecture, by transformers' own modules."""

from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.transformers_any.spec:transformers_spec",
    model="saccade.families.transformers_any.net:AnyModel",
    architectures=(),
    model_types=("transformers_any",),
    package="transformers",
    gguf="saccade.families.transformers_any.gguf:FACTS",
)
