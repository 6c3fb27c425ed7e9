"""Options for logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from saccade.core.options import ServeOptions
from saccade.core.settings import LogSettings
from saccade.core.tuning import at_least, tuned


@dataclass(frozen=True, slots=True)
class LogOptions(LogSettings):
    """The format of log lines, and which requests are logged."""

    needs_server: ClassVar[bool] = True
    log_requests: bool = tuned(False, "Log one line per request with its tokens, images and times.")
    log_slow_seconds: float | None = tuned(
        None, "Log each image's trace for requests that take more seconds than this (off)."
    )

    def __post_init__(self) -> None:
        at_least(0, self, "log_slow_seconds")


def is_enabled(options: ServeOptions) -> bool:
    own = options.of(LogOptions)
    return own.log_requests or own.log_slow_seconds is not None
