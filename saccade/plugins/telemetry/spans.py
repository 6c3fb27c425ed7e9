"""Converts timelines to OpenTelemetry spans, and sends them to a collector.

Names follow OpenTelemetry's semantic conventions for HTTP and for generative AI. Other names start
with `saccade.`. No attribute contains users' text or images. This is the only module that imports
OpenTelemetry's libraries (extra `otel`), and only the thread of `recorder.py` calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from saccade import __version__
from saccade.api.trace.request_trace import OPERATIONS
from saccade.api.trace.timeline import RequestTimeline
from saccade.api.trace.tracer import Figure, Leg

EXPORT_SECONDS = 10.0
"""The timeout for one batch, including retries."""
SERVER_FAULT = 500
CLIENT_LEFT = "client_disconnected"


class Spans:
    """Converts timelines to spans, and sends them to the collector at `url`."""

    def __init__(self, url: str) -> None:
        # These loggers would report a missing collector for each batch. `Telemetry` reports it
        # once.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "saccade"}))
        self._made = InMemorySpanExporter()
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._made))
        self._tracer = provider.get_tracer("saccade", __version__)
        self._parents = TraceContextTextMapPropagator()
        self._exporter = OTLPSpanExporter(url, timeout=EXPORT_SECONDS)

    def send(self, journeys: Sequence[RequestTimeline]) -> bool:
        """Send timelines. Returns True if the collector has accepted them."""
        for journey in journeys:
            self._make(journey)
        made = self._made.get_finished_spans()
        self._made.clear()
        return not made or self._exporter.export(made) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _make(self, journey: RequestTimeline) -> None:
        def at(moment: float) -> int:
            return int((journey.wall + moment) * 1e9)

        operation = OPERATIONS[journey.path]
        carried = {"traceparent": journey.parent, "tracestate": journey.state}
        root = self._tracer.start_span(
            f"{operation} {journey.model}" if journey.model else operation,
            self._parents.extract(carried),
            SpanKind.SERVER,
            dict(_attributes(journey)),
            start_time=at(journey.begun),
        )
        within = set_span_in_context(root)
        for leg in _legs(journey):
            named = {f"saccade.{name}": value for name, value in leg.figures.items()}
            span = self._tracer.start_span(
                leg.name, within, SpanKind.INTERNAL, named, start_time=at(leg.begun)
            )
            span.end(at(max(leg.begun, leg.ended)))
        if journey.failed or not journey.whole:
            error = journey.failed or CLIENT_LEFT
            root.set_attribute("error.type", error)
            # By the conventions, a rejected request is not an error of the server.
            if journey.status is None or not 300 <= journey.status < SERVER_FAULT:
                root.set_status(Status(StatusCode.ERROR, error))
        root.end(at(journey.ended))


def _legs(journey: RequestTimeline) -> Iterator[Leg]:
    answer = journey.answer
    if answer is not None:
        yield Leg("receive", journey.begun, answer.arrival)
        yield from answer.legs
    if journey.answering is not None:
        yield Leg("stream", journey.answering, journey.ended)


def _attributes(journey: RequestTimeline) -> Iterator[tuple[str, Figure | tuple[str, ...]]]:
    yield "http.request.method", "POST"
    yield "http.route", journey.path
    yield "saccade.request_id", journey.request_id
    if journey.status is not None:
        yield "http.response.status_code", journey.status
    yield "gen_ai.operation.name", OPERATIONS[journey.path]
    yield "gen_ai.provider.name", "saccade"
    if journey.model:
        yield "gen_ai.request.model", journey.model
        yield "gen_ai.response.model", journey.model
        yield "gen_ai.request.stream", journey.streamed
    if (answer := journey.answer) is None:
        return
    for name, limit in answer.limits.items():
        yield f"gen_ai.request.{name}", limit
    if answer.count > 1:
        yield "gen_ai.request.choice.count", answer.count
    if answer.finishes:
        yield "gen_ai.response.finish_reasons", answer.finishes
    usage, prompt = answer.usage, answer.usage.prompt_tokens_details
    yield "gen_ai.usage.input_tokens", usage.prompt_tokens
    yield "gen_ai.usage.output_tokens", usage.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", prompt.cached_tokens
    yield "gen_ai.usage.cache_creation.input_tokens", prompt.cache_write_tokens
    if guesses := usage.completion_tokens_details:
        yield "saccade.guesses.right", guesses.accepted_prediction_tokens
        yield "saccade.guesses.wrong", guesses.rejected_prediction_tokens
    yield "saccade.image_tokens", prompt.image_tokens
    yield "saccade.images", answer.images
    for level, count in answer.levels.items():
        yield f"saccade.images.{level}", count
    if journey.streamed and answer.first is not None:
        yield "gen_ai.response.time_to_first_chunk", answer.first - journey.begun
