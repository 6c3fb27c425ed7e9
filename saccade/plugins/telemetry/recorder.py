"""Sends the timelines of requests as OpenTelemetry traces to a collector, from a separate thread.

The event loop only appends to a bounded queue, and timelines beyond the bound are dropped and
counted. So a slow or missing collector does not delay requests.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from saccade.api.trace.timeline import RequestTimeline
from saccade.core.metrics import Metrics
from saccade.core.options import ServeOptions
from saccade.core.shown_url import shown_url
from saccade.plugins.telemetry.options import TelemetryOptions

log = logging.getLogger("saccade")

MAX_WAITING = 1024
"""Maximum timelines in the queue. Each has some KB."""
MAX_IN_BATCH = 64
BATCH_SECONDS = 1.0
"""How long a timeline waits for others to be sent with it."""
CLOSE_SECONDS = 3.0
"""How long `close` waits for the thread to send the remaining timelines."""


def build_recorder(options: ServeOptions, metrics: Metrics) -> Telemetry:
    url = options.of(TelemetryOptions).traces_url
    assert url is not None
    return Telemetry(url, metrics)


class Telemetry:
    """Sends timelines of requests to the collector at `url`.

    Call `record` from the event loop, and `close` once from any thread.
    """

    def __init__(self, url: str, metrics: Metrics) -> None:
        """Start the thread."""
        self._url = url
        self._metrics = metrics
        self._waiting: queue.Queue[RequestTimeline] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._lost = 0  # written only by the thread
        self._counted = 0  # the part of `_lost` that metrics include
        self._thread = threading.Thread(target=self._run, name="saccade-traces", daemon=True)
        self._thread.start()

    def record(self, journey: RequestTimeline) -> None:
        """Queue the timeline of a finished request, without blocking."""
        lost = self._lost
        dropped = lost - self._counted
        self._counted = lost
        try:
            self._waiting.put_nowait(journey)
        except queue.Full:
            dropped += 1
        if dropped:
            self._metrics.inc("saccade_traces_dropped_total", dropped)

    def close(self) -> None:
        """Send the queued timelines, and wait for at most `CLOSE_SECONDS`."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        # Imported here, since the libraries take time and tens of MB of memory.
        from saccade.plugins.telemetry.spans import Spans

        spans = Spans(self._url)
        reached = True
        while batch := self._batch():
            try:
                sent = spans.send(batch)
            except Exception:  # a fault in tracing must not stop the server
                log.exception("a trace could not be created")
                sent = False
            if not sent:
                self._lost += len(batch)
            if sent != reached:
                reached = sent
                if sent:
                    log.info("traces reach %s again", shown_url(self._url))
                else:
                    log.warning(
                        "traces do not reach %s; requests are not affected", shown_url(self._url)
                    )
        spans.close()

    def _batch(self) -> list[RequestTimeline]:
        """Wait for timelines, and remove and return them. Returns an empty list if the server is
        stopping and none are left.
        """
        batch: list[RequestTimeline] = []
        due = 0.0
        while len(batch) < MAX_IN_BATCH:
            now = time.monotonic()
            left = due - now if batch else BATCH_SECONDS
            closing = self._closing.is_set()
            try:
                batch.append(self._waiting.get(not closing and left > 0, max(left, 0.0)))
            except queue.Empty:
                if batch or closing:
                    break
                continue
            if len(batch) == 1:
                due = now + BATCH_SECONDS
        return batch
