"""Options for several servers: the spread of requests, by `saccade route` or on Ray Serve, and
Ray's resources for each.

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
class SpreadOptions:
    """How any router spreads requests over servers."""

    affinity: Literal["image", "none"] = "image"
    """image: a request goes to the server that has seen its oldest image, or the beginning of its
    chat. none: to any server, to measure the worth of affinity.
    """
    max_body_mb: int = 256
    """Largest request body, in MiB."""
    max_inflight_mb: int | None = None
    """MiB of bodies held for requests in flight; a request beyond this limit is answered 429.
    Derived: a quarter of memory.
    """
    max_requests: int = 4096
    """Requests in flight; more are answered 429."""
    cors_origins: tuple[str, ...] = ()
    """Browser origins that may read what the router itself answers; "*" for any. Give the servers
    the same: their answers pass as they are.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Host names that the router also answers to. On a loopback address it answers to localhost and
    loopback addresses only, so that no web page can use it.
    """

    def __post_init__(self) -> None:
        named(self, "cors_origins", "allowed_hosts")
        at_least(1, self, "max_body_mb", "max_inflight_mb", "max_requests")

    @property
    def inflight_bytes(self) -> int:
        """Return the bytes that bodies may hold."""
        return share_of_memory(self.max_inflight_mb)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions(SpreadOptions):
    """How `saccade route` spreads requests over servers."""

    workers: tuple[str, ...]
    """The servers, as http://HOST:PORT; several in a row. Every router must name a server alike."""
    host: str = "127.0.0.1"
    """Address to listen on. Keys are the workers' to check: give each of them the same --api-key.
    """
    port: int = 8100
    """Port to listen on; 0 picks a free port."""

    def __post_init__(self) -> None:
        SpreadOptions.__post_init__(self)
        filled(self, "workers")
        named(self, "workers")
        at_least(0, self, "port")
        at_most(65535, self, "port")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """A cluster's resources that Ray Serve gives to servers."""

    replicas: int = 1
    """Servers; with --max-replicas, the fewest."""
    max_replicas: int | None = None
    """Most servers: Ray starts and ends servers by their requests. Derived: always --replicas."""
    target_requests: float = 32.0
    """Requests per server, running and waiting, above which Ray starts more servers."""
    gpus: float | None = None
    """GPUs of each server, as many as its --tp-size; 0: the server runs on CPUs. Derived: 1 if this
    machine has an NVIDIA driver, else 0.
    """
    cpus: float | None = None
    """CPU cores that Ray books for each server, without enforcing them. Derived: 4, or an equal
    part of the cores that ingresses leave on this machine, if less.
    """
    encoders: int = 0
    """Servers of role encode, which encode the images of all other servers, with the same resources
    each. 0: each server encodes. With keys, set SACCADE_ENCODER_KEY to the value of SACCADE_API_KEY
    where Ray starts.
    """
    ingresses: int = 1
    """Processes that take requests and rank servers."""
    max_ongoing: int = 256
    """Requests at one server at a time; more wait at the ingress."""
    drain: float = 60.0
    """Seconds that a server's requests get to finish when it is ended."""
    host: str = "127.0.0.1"
    """Address on which Ray listens for requests. Keys are the servers' to check."""
    port: int = 8000
    """Port on which Ray listens."""
    output: str | None = None
    """File to write to. Derived: standard output."""

    def __post_init__(self) -> None:
        at_least(1, self, "replicas", "max_replicas", "ingresses", "max_ongoing", "port")
        at_least(0, self, "gpus", "drain", "encoders")
        above(0, self, "cpus", "target_requests")
        at_most(65535, self, "port")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"--max-replicas {self.max_replicas}: must be at least --replicas {self.replicas}"
            )
