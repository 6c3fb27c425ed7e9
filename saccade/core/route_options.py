"""Options for what stands before servers: the spread of requests over several, by `saccade route`
or on Ray Serve, Ray's resources for each, and `saccade proxy` before one.

Written as in `options.py`: a field is an option, the string below the field its help, None means
"derive it". Knows nothing of requests to servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.bounds import above, at_least, at_most, filled, named
from saccade.core.errors import ConfigError
from saccade.core.options import share_of_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """What a relay takes from clients."""

    max_body_mb: int = 256
    """Maximum request body, in MiB."""
    max_inflight_mb: int | None = None
    """MiB of bodies held for requests in flight. A request beyond this limit is answered 429.
    Derived: a quarter of memory.
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

    workers: tuple[str, ...]
    """The servers, as one or more http://HOST:PORT. Every router must use the same names."""
    host: str = "127.0.0.1"
    """Address to listen on. The workers check keys, so give each worker the same --api-key.
    """
    port: int = 8100
    """Port to listen on. 0 picks a free port."""

    def __post_init__(self) -> None:
        RelayOptions.__post_init__(self)
        filled(self, "workers")
        named(self, "workers")
        at_least(0, self, "port")
        at_most(65535, self, "port")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions(RelayOptions):
    """Where `saccade proxy` listens, and which server it asks."""

    upstream: str
    """The server's URL: http://HOST:PORT or https://HOST, with or without a path and /v1."""
    host: str = "127.0.0.1"
    """Address to listen on. The server checks keys. The proxy passes them on."""
    port: int = 8200
    """Port to listen on. 0 picks a free port."""

    def __post_init__(self) -> None:
        RelayOptions.__post_init__(self)
        at_least(0, self, "port")
        at_most(65535, self, "port")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """A cluster's resources that Ray Serve gives to servers."""

    replicas: int = 1
    """Number of servers. With --max-replicas, the minimum."""
    max_replicas: int | None = None
    """Maximum servers. Ray starts and ends servers as requests vary. Derived: --replicas."""
    target_requests: float = 32.0
    """Requests per server, running and waiting, above which Ray starts more servers."""
    gpus: float | None = None
    """GPUs per server, equal to its --tp-size. With 0, the server runs on CPUs. Derived: 1 if this
    machine has an NVIDIA driver, else 0.
    """
    cpus: float | None = None
    """CPU cores that Ray books for each server. Ray does not enforce them. Derived: 4, or an equal
    share of the cores that ingresses leave on this machine if that is less.
    """
    encoders: int = 0
    """Number of servers with role encode. They encode the images for all other servers and have the
    same resources each. With 0, each server encodes its own. If you use keys, set
    SACCADE_ENCODER_KEY to the value of SACCADE_API_KEY where Ray starts.
    """
    ingresses: int = 1
    """Number of processes that take requests and rank servers."""
    max_ongoing: int = 256
    """Maximum requests at one server at a time. More wait at the ingress."""
    drain: float = 60.0
    """Seconds that a server's requests get to finish when the server stops."""
    host: str = "127.0.0.1"
    """Address on which Ray listens for requests. The servers check keys."""
    port: int = 8000
    """Port on which Ray listens."""
    output: str | None = None
    """The file to write. Derived: standard output."""

    def __post_init__(self) -> None:
        at_least(1, self, "replicas", "max_replicas", "ingresses", "max_ongoing", "port")
        at_least(0, self, "gpus", "drain", "encoders")
        above(0, self, "cpus", "target_requests")
        at_most(65535, self, "port")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"--max-replicas {self.max_replicas}: must be at least --replicas {self.replicas}"
            )
