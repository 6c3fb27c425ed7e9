"""Journeys of requests as OpenTelemetry traces, sent to a collector by a thread of its own.

Owns that thread and the journeys that wait for it (bounded: beyond, they are counted and dropped).
The event loop only puts a trace into the queue: a slow, missing or broken collector costs
requests nothing.
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
"""Journeys that wait for the thread; each is some KB."""
MAX_IN_BATCH = 64
BATCH_SECONDS = 1.0
"""A journey waits so long for others to be sent with it."""
CLOSE_SECONDS = 3.0
"""At the end the thread gets so long to send what waits."""


def build_recorder(options: ServeOptions, metrics: Metrics) -> Telemetry:
    url = options.of(TelemetryOptions).traces_url
    assert url is not None
    return Telemetry(url, metrics)


class Telemetry:
    """Sends journeys to the collector at `url`. `record` belongs to the event loop. Any thread may
    call `close`, once.
    """

    def __init__(self, url: str, metrics: Metrics) -> None:
        """Start the thread that sends."""
        self._url = url
        self._metrics = metrics
        self._waiting: queue.Queue[RequestTimeline] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._lost = 0  # written by the thread alone
        self._counted = 0  # of those, counted in the metrics
        self._thread = threading.Thread(target=self._run, name="saccade-traces", daemon=True)
        self._thread.start()

    def record(self, journey: RequestTimeline) -> None:
        """Queue an ended journey to be sent, without waiting."""
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
        """Send waiting timelines, within `CLOSE_SECONDS`."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        # Only now: the libraries take their time to be imported, and tens of MB.
        from saccade.plugins.telemetry.spans import Spans

        spans = Spans(self._url)
        reached = True
        while batch := self._batch():
            try:
                sent = spans.send(batch)
            except Exception:  # traces are not worth a server
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
        """Wait for the next journeys. Returns an empty list once the server ends and none waits."""
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
