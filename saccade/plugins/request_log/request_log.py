"""Writes log lines about finished requests, without their content."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from saccade.api.chat.write import UsageCounter
from saccade.api.trace.tracer import Tracer
from saccade.core.options import ServeOptions
from saccade.edge.headers import request_id
from saccade.front.prepared import PreparedRequest
from saccade.plugins.request_log.options import LogOptions

log = logging.getLogger("saccade")


class RequestLog:
    """Logs one line per request and, if enabled, the traces of images in slow requests."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options.of(LogOptions)

    def __call__(
        self, prepared: Sequence[PreparedRequest], tally: UsageCounter, tracer: Tracer
    ) -> None:
        """Log a finished request."""
        request, usage = prepared[0].request, tally.usage
        if self._options.log_requests:
            log.info(
                "%s: %s: %d prompt tokens (%d cached), %d images, %d tokens, %.3f s",
                request_id.get(),
                request.id,
                usage.prompt_tokens,
                usage.prompt_tokens_details.cached_tokens,
                len(request.images),
                usage.completion_tokens,
                tracer.seconds,
            )
        slow = self._options.log_slow_seconds
        if slow is not None and tracer.seconds > slow:
            log.warning(
                "%s: %s was slow: %s",
                request_id.get(),
                request.id,
                msgspec.json.encode(tracer.trace).decode(),
            )
