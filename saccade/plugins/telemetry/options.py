"""The option for request traces, and its requirements."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit, urlunsplit

from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install
from saccade.core.options import ServeOptions


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """Traces of requests."""

    otlp_traces_endpoint: str | None = None
    """Send a trace of every request to this OpenTelemetry collector (OTLP over HTTP, protobuf), for
    example http://127.0.0.1:4318. A trace contains no text and no image. This option needs the
    extra otel.
    """

    def __post_init__(self) -> None:
        _ = self.traces_url

    @property
    def traces_url(self) -> str | None:
        """The collector's endpoint, with the default path if the given URL has none.

        Raises ConfigError if the endpoint is not an http(s) URL.
        """
        given = self.otlp_traces_endpoint
        if given is None:
            return None
        try:
            url = urlsplit(given)
            whole = url.scheme in ("http", "https") and url.hostname and url.port != 0
        except ValueError:  # the port is not a number
            whole = False
        if not whole:
            raise ConfigError(
                f"--otlp-traces-endpoint {given!r}: give a URL such as http://127.0.0.1:4318 (OTLP "
                "over HTTP; 4317 is usually the port for gRPC)"
            )
        return given if url.path.strip("/") else urlunsplit(url._replace(path="/v1/traces"))


def is_enabled(options: ServeOptions) -> bool:
    """Return True if traces should be sent. Raises ConfigError if the extra is not installed."""
    if options.of(TelemetryOptions).traces_url is None:
        return False
    check_installed()
    return True


def check_installed() -> None:
    """Raise ConfigError if the extra is not installed."""
    try:
        missing = find_spec("opentelemetry.sdk") is None or (
            find_spec("opentelemetry.exporter.otlp.proto.http") is None
        )
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry's libraries: " + how_to_install(".[otel]")
        )
