"""Traces: one for each request, a span for each stage, nothing of what users say or show; and a
collector that is gone, slow or full costs requests nothing.
"""

from __future__ import annotations

import base64
import re
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.core.errors import ConfigError
from saccade.core.options import ServeOptions, ServerOptions
from saccade.plugins.telemetry import recorder
from saccade.plugins.telemetry.options import TelemetryOptions, is_enabled
from tests.edge.test_tenants import part, png
from tests.helpers.asking import BODY, eventually, in_flight
from tests.helpers.collector import Collector, Span, collecting
from tests.helpers.served import TOKENIZER, Served, serving

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "my name is Rumpelstiltskin"


@pytest.fixture(scope="module")
def module_collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture
def collector(module_collector: Collector) -> Collector:
    """One collector for all tests of the module, without the traces of those before: a test asks
    under the same names directly and through a router.
    """
    module_collector.spans.clear()
    return module_collector


@pytest.fixture(scope="module")
def module_server(module_collector: Collector) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "BATCH_SECONDS", 0.02)
        traces = TelemetryOptions(otlp_traces_endpoint=module_collector.address)
        options = ServerOptions(port=0, served_model_name=("demo", "other"))
        with serving(options, extras=(traces,)) as served:
            yield served


def traced(collector: Collector, name: str) -> tuple[Span, dict[str, Span]]:
    eventually(lambda: collector.trace(name) is not None)
    found = collector.trace(name)
    assert found is not None
    return found


def send(served: Served, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return served.http.post(path, json=body, headers=headers)


MESSAGES = [{"role": "user", "content": [part(png()), {"type": "text", "text": SECRET}]}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_for_each_stage_under_the_clients_own(
    served: Served, collector: Collector, stream: bool
) -> None:
    name = f"stages-{stream}"
    messages = [{"role": "user", "content": [part(png(40 + stream)), *MESSAGES[0]["content"][1:]]}]
    body = {"model": "other", "messages": messages, "stream": stream, "stop": [SECRET]}
    before = time.time_ns()
    answer = send(
        served,
        "/v1/chat/completions",
        {**body, "max_tokens": 9, "user": SECRET},
        **{"x-request-id": name, "traceparent": PARENT},
    )
    after = time.time_ns()
    assert answer.status_code == 200
    root, spans = traced(collector, name)
    assert root.name == "chat other"
    assert (root.trace, root.parent) == tuple(PARENT.split("-")[1:3])
    assert set(spans) == {
        "receive",
        "prepare",
        "image.fetch",
        "image.digest",
        "image.decode",
        "image.ship",
        "image.encode",
        "queue",
        "prefill",
        "decode",
        "stream",
    }
    order = [spans[each] for each in ("receive", "prepare", "queue", "prefill", "decode")]
    for one, next_one in pairwise(order):
        assert abs(one.end - next_one.begin) < 1_000 or one.end <= next_one.begin
    assert before - 10**7 <= root.begin == spans["receive"].begin
    assert root.end == spans["stream"].end <= after + 10**7
    for span in spans.values():
        assert root.begin - 1_000 <= span.begin <= span.end <= root.end + 1_000, span.name
        assert span.trace == root.trace
    for span in (spans["image.fetch"], spans["image.encode"]):
        assert span.attributes["saccade.place"] == "messages[0].content[0]"
    told = root.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "other"
    assert told["gen_ai.request.max_tokens"] == 9
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.usage.output_tokens"] == len(TOKENIZER.encode("Hello!")) + 1
    assert told["gen_ai.usage.cache_read.input_tokens"] == 5
    assert told["saccade.images"] == told["saccade.images.none"] == 1
    assert told["http.response.status_code"] == 200 and not root.failed
    assert ("gen_ai.response.time_to_first_chunk" in told) == stream
    assert collector.services == {"saccade"} and set(collector.paths) == {"/v1/traces"}


def test_nothing_that_users_say_or_show_is_sent(served: Served, collector: Collector) -> None:
    image = png(48)
    texts: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": SECRET, "stop": SECRET, "user": SECRET}),
        ("/v1/messages", {"max_tokens": 5, "system": SECRET, "messages": BODY["messages"]}),
        ("/v1/responses", {"input": SECRET, "instructions": SECRET, "metadata": {"a": SECRET}}),
        ("/v1/chat/completions", {"messages": BODY["messages"], "cache_salt": SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part(image)]}]}),
        ("/v1/chat/completions", {"model": SECRET, "messages": BODY["messages"]}),
        ("/v1/chat/completions", {"messages": BODY["messages"], SECRET: SECRET}),
    ]
    for number, (path, body) in enumerate(texts):
        send(served, path, body, **{"x-request-id": f"quiet-{number}", "tracestate": "a=b"})
    for number in range(len(texts)):
        traced(collector, f"quiet-{number}")
    sent = b"".join(collector.bodies)
    for secret in (SECRET.encode(), image, base64.b64encode(image)[:40], b"Rumpel", b"Hello!"):
        assert secret not in sent


def test_a_refused_request_says_why_and_is_no_fault_of_the_server(
    served: Served, collector: Collector
) -> None:
    wrong = {"model": "nobody", "messages": BODY["messages"]}
    assert send(served, "/v1/chat/completions", wrong, **{"x-request-id": "no"}).status_code == 404
    root, spans = traced(collector, "no")
    assert root.name == "chat" and set(spans) == {"stream"} and not root.failed
    assert root.attributes["error.type"] == "model_not_found"
    assert root.attributes["http.response.status_code"] == 404


def test_an_answer_that_fails_within_its_stream(served: Served, collector: Collector) -> None:
    served.engine.fault = ("the grammar grew", "grammar_too_complex")
    body = {**BODY, "stream": True}
    assert send(served, "/v1/chat/completions", body, **{"x-request-id": "half"}).status_code == 200
    root, spans = traced(collector, "half")
    assert root.failed and root.attributes["error.type"] == "grammar_too_complex"
    assert "gen_ai.response.finish_reasons" not in root.attributes and "decode" in spans


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(served: Served, collector: Collector, stream: bool) -> None:
    served.engine.paused = True
    name = f"left-{stream}"
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{served.address}/v1/chat/completions",
                json={**BODY, "stream": stream},
                headers={"x-request-id": name},
                timeout=0.2,
            )
        eventually(lambda: in_flight(served) == 0)
    finally:
        served.engine.paused = False
    root, spans = traced(collector, name)
    assert root.failed and root.attributes["error.type"] == "client_disconnected"
    assert ("stream" in spans) == stream and "decode" in spans
    assert root.attributes["gen_ai.usage.output_tokens"] == 2


def test_what_the_client_does_not_sample_is_not_sent(served: Served, collector: Collector) -> None:
    unsampled = PARENT[:-1] + "0"
    for name, headers in (("unwatched", {"traceparent": unsampled}), ("watched", {})):
        send(served, "/v1/chat/completions", BODY, **{"x-request-id": name, **headers})
    traced(collector, "watched")
    assert collector.trace("unwatched") is None
    for name, parent in (("odd", "00-xyz"), ("long", "0" * 5_000)):  # no parent, and no error
        send(served, "/v1/chat/completions", BODY, **{"x-request-id": name, "traceparent": parent})
        assert traced(collector, name)[0].parent == ""


# ---- collectors that fail


@pytest.mark.more
def test_a_collector_that_never_answers_slows_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING", 3)
    monkeypatch.setattr(recorder, "MAX_IN_BATCH", 1)
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = ServerOptions(port=0, served_model_name=("demo",))
        with serving(options, extras=(TelemetryOptions(address),)) as served:
            for _ in range(8):
                assert send(served, "/v1/chat/completions", BODY).status_code == 200
            metrics = served.http.get("/metrics").text
    dropped = re.search(r"^saccade_traces_dropped_total (\d+)", metrics, re.M)
    assert dropped is not None and 4 <= int(dropped[1]) <= 5


def test_a_collector_that_refuses_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "BATCH_SECONDS", 0.02)
    options = ServerOptions(port=0, served_model_name=("demo",))
    with collecting() as collector:
        traces = TelemetryOptions(otlp_traces_endpoint=collector.address)
        with serving(options, extras=(traces,)) as served:
            collector.status = 400
            for _ in range(3):
                send(served, "/v1/chat/completions", BODY)
                time.sleep(0.05)
            eventually(lambda: "do not reach" in caplog.text)
            collector.status = 200
            send(served, "/v1/chat/completions", BODY, **{"x-request-id": "again"})
            traced(collector, "again")
            dropped = served.front.metrics.value("saccade_traces_dropped_total")
    assert caplog.text.count("do not reach") == 1
    assert 1 <= dropped <= 3


def test_what_waits_is_sent_at_the_end() -> None:
    with collecting() as collector:
        traces = TelemetryOptions(otlp_traces_endpoint=f"{collector.address}/v1/traces")
        with serving(
            ServerOptions(port=0, served_model_name=("demo",)), extras=(traces,)
        ) as served:
            send(served, "/v1/chat/completions", BODY, **{"x-request-id": "last"})
        assert collector.trace("last") is not None


# ---- start-up


def test_without_the_extra_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "opentelemetry.exporter.otlp.proto.http"
    monkeypatch.setattr(
        "saccade.plugins.telemetry.options.find_spec",
        lambda name: None if name == gone else find_spec(name),
    )
    with pytest.raises(ConfigError, match=r"scripts/install\.py .*'\.\[otel\]'"):
        is_enabled(ServeOptions(extras=(TelemetryOptions("http://127.0.0.1:4318"),)))


@pytest.mark.parametrize("url", ["", "collector:4317", "grpc://a:4317", "http://", "http://a:b"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        TelemetryOptions(url)


def test_the_server_without_traces_imports_no_opentelemetry_sdk() -> None:
    source = Path(recorder.__file__).parent
    named = {path.name for path in source.glob("*.py") if "from opentelemetry" in path.read_text()}
    assert named == {"spans.py"}
