"""The fallback family, for architectures that no other family supports."""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.any_model.spec:transformers_spec",
    model="saccade.plugins.any_model.net:AnyModel",
    architectures=(),
    model_types=("transformers_any",),
    package="transformers",
    pixels="saccade.plugins.any_model.pixels",
    gguf="saccade.plugins.any_model.gguf:FACTS",
)
