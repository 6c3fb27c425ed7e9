"""Options of programs in front of servers: those of any relay, and the distribution of requests
over several servers.

Written as in `core/options.py`: a field is an option, the string below the field its help, None
means "derive it".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import ConfigError
from saccade.core.options import share_of_memory
from saccade.core.tuning import at_least, at_most, named


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """What a relay takes from clients."""

    max_body_mb: int = 256
    """Maximum request body, in MiB."""
    max_inflight_mb: int | None = None
    """MiB of bodies held for requests in flight. A request beyond this limit is answered 429.
    Default: a quarter of memory.
    """
    max_requests: int = 4096
    """Maximum requests in flight. More are answered 429."""
    cors_origins: tuple[str, ...] = ()
    """Browser origins that may read its own answers. "*" allows any. Give the servers the same
    origins, because their answers are passed on unchanged.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Host names that it also answers to. On a loopback address it answers only to localhost and
    loopback addresses. This keeps web pages from using it.
    """

    def __post_init__(self) -> None:
        named(self, "cors_origins", "allowed_hosts")
        at_least(1, self, "max_body_mb", "max_inflight_mb", "max_requests")

    @property
    def inflight_bytes(self) -> int:
        """Return the bytes that bodies may hold."""
        return share_of_memory(self.max_inflight_mb)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOptions(RelayOptions):
    """How any router spreads requests over servers."""

    affinity: Literal["image", "none"] = "image"
    """Which server gets a request. image: the one that has seen its oldest image or the beginning
    of its chat. none: any server, to measure what affinity is worth.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions(SpreadOptions):
    """How `saccade route` spreads requests over servers."""

    workers: tuple[str, ...] = ()
    """The servers, as one or more http://HOST:PORT. Every router must use the same names."""
    models: str | None = None
    """A TOML file of models by name, in place of --workers. The router starts a server for a model
    when a request names it, and stops idle servers (docs/several-models.md).
    """
    host: str = "127.0.0.1"
    """Address to listen on. The workers check keys, so give each worker the same --api-key."""
    port: int = 8100
    """Port to listen on. 0 picks a free port."""

    def __post_init__(self) -> None:
        RelayOptions.__post_init__(self)
        if bool(self.workers) == (self.models is not None):
            raise ConfigError("--workers URLS or --models FILE is required")
        named(self, "workers")
        at_least(0, self, "port")
        at_most(65535, self, "port")
