"""Options of `saccade deploy ray`, as in `core/options.py`."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import ConfigError
from saccade.core.tuning import above, at_least, at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """The resources of a cluster that Ray Serve assigns to servers."""

    replicas: int = 1
    """Number of servers. With --max-replicas, the minimum."""
    max_replicas: int | None = None
    """Maximum servers. Ray starts and stops servers as load varies. Default: --replicas."""
    target_requests: float = 32.0
    """Requests per server, running and waiting, above which Ray starts more servers."""
    gpus: float | None = None
    """GPUs per server, equal to its --tp-size. With 0, the server runs on CPUs. Default: 1 if this
    machine has an NVIDIA driver, else 0.
    """
    cpus: float | None = None
    """CPU cores that Ray reserves for each server. Ray does not enforce them. Default: 4, or an
    equal share of this machine's cores without those of ingresses, if that is less.
    """
    encoders: int = 0
    """Number of servers with role encode. They encode the images for all other servers and have the
    same resources each. With 0, each server encodes its own. If you use keys, set
    SACCADE_ENCODER_KEY to the value of SACCADE_API_KEY where Ray starts.
    """
    ingresses: int = 1
    """Number of processes that accept requests and choose servers."""
    max_ongoing: int = 256
    """Maximum requests at one server at a time. More wait at the ingress."""
    drain: float = 60.0
    """Seconds in which requests in progress may finish when their server stops."""
    host: str = "127.0.0.1"
    """Address on which Ray listens for requests. The servers check keys."""
    port: int = 8000
    """Port on which Ray listens."""
    output: str | None = None
    """The file to write. Default: standard output."""

    def __post_init__(self) -> None:
        at_least(1, self, "replicas", "max_replicas", "ingresses", "max_ongoing", "port")
        at_least(0, self, "gpus", "drain", "encoders")
        above(0, self, "cpus", "target_requests")
        at_most(65535, self, "port")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"--max-replicas {self.max_replicas} must be at least --replicas {self.replicas}"
            )
