"""Servers that only encode images, and the client with which servers of role language request
embeddings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import Http, Offer, Plugin, Requests, Runtime, Scheduling

if TYPE_CHECKING:
    from saccade.core.config import EngineConfig
    from saccade.core.options import ServeOptions
    from saccade.ipc.messages import Load

PLUGIN = Plugin(
    "encoder",
    options="saccade.plugins.encoder.options:RoleOptions",
    asked="saccade.plugins.encoder:is_encoder",
    http=Http(
        routes="saccade.plugins.encoder.handlers:encode_routes",
        paths=("/internal/embedding",),
    ),
    requests=Requests(
        embeddings=Offer(
            "saccade.plugins.encoder.encoders:build_encoders",
            "saccade.plugins.encoder:asks_encoders",
        ),
    ),
    scheduling=Scheduling(
        scheduler=Offer(
            "saccade.plugins.encoder.encode_scheduler:build_encode_scheduler",
            "saccade.plugins.encoder:encodes",
        ),
    ),
    runtime=Runtime(
        worker=Offer(
            "saccade.plugins.encoder.worker:load_worker", "saccade.plugins.encoder:loads_tower"
        ),
    ),
)


def is_encoder(options: ServeOptions) -> bool:
    return options.role == "encode"


def asks_encoders(options: ServeOptions) -> bool:
    return options.role == "language"


def encodes(config: EngineConfig) -> bool:
    return config.encoder.role == "encode"


def loads_tower(load: Load) -> bool:
    return load.role == "encode"
