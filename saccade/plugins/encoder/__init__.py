"""A server that only encodes images, for servers of role language."""

from __future__ import annotations

from saccade.core.exchange import ENCODE_PATH
from saccade.core.options import ServeOptions
from saccade.plugin import Plugin

PLUGIN = Plugin(
    "encoder",
    routes="saccade.api.encode:encode_routes",
    paths=(ENCODE_PATH,),
    asked="saccade.plugins.encoder:is_encoder",
)


def is_encoder(options: ServeOptions) -> bool:
    return options.role.role == "encode"
