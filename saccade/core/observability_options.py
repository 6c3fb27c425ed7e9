"""Options for metrics, logs and traces, written as in `options.py`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from saccade.core.bounds import at_least
from saccade.core.errors import ConfigError
from saccade.core.tuning import tuned


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """Metrics, logs and request traces."""

    metrics_without_key: bool = False
    """Answer /metrics to clients without the key, too."""
    log_requests: bool = tuned(False, "Log one line per request with its tokens, images and times.")
    log_slow_seconds: float | None = tuned(
        None, "Log each image's trace for requests that take more seconds than this (off)."
    )
    otlp_traces_endpoint: str | None = None
    """Send a trace of every request, with a span for each stage, to this OpenTelemetry collector
    (OTLP over HTTP, protobuf), for example http://127.0.0.1:4318. A trace holds no text and no
    image. OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS are honoured. This
    option needs the extra otel.
    """

    def __post_init__(self) -> None:
        at_least(0, self, "log_slow_seconds")
        if self.otlp_traces_endpoint is not None:
            _ = self.traces_url

    @property
    def traces_url(self) -> str | None:
        """Return the collector's endpoint, with the usual path if the given URL lacks one.

        Raises ConfigError unless the endpoint is an http(s) URL.
        """
        given = self.otlp_traces_endpoint
        if given is None:
            return None
        try:
            url = urlsplit(given)
            whole = url.scheme in ("http", "https") and url.hostname and url.port != 0
        except ValueError:  # a port that is no number
            whole = False
        if not whole:
            raise ConfigError(
                f"--otlp-traces-endpoint {given!r}: give a URL such as http://127.0.0.1:4318 (OTLP "
                "over HTTP; 4317 is usually the port for gRPC)"
            )
        return given if url.path.strip("/") else urlunsplit(url._replace(path="/v1/traces"))
