"""Each response is counted in /metrics, by status code and by the error's code."""

from __future__ import annotations

from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from saccade import __version__
from saccade.core.options import ServerOptions
from tests.helpers.served import Served, serving

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def samples(http: httpx.Client, name: str) -> Counter[tuple[str, ...]]:
    """Return a metric's values by its labels' values, by the labels' names."""
    found: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found[labels] = sample.value  # type: ignore[assignment]
    return found


def responses(http: httpx.Client) -> Counter[tuple[str, ...]]:
    return samples(http, "saccade_http_responses_total")


def test_each_refusal_is_counted_by_its_reason(module_server: Served) -> None:
    http = module_server.http
    before = responses(http)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    shown = [{"role": "user", "content": [image]}]
    sent = [
        http.post("/v1/chat/completions", json=CHAT),
        http.post("/v1/chat/completions", json={**CHAT, "model": "gpt-4o"}),
        http.post("/v1/chat/completions", json={"messages": shown}),
        http.post("/v1/chat/completions", content=b"{"),
        http.post("/v1/messages", json={}),
        http.get("/v1/none"),
        http.get("/v1/chat/completions"),
    ]
    counted = responses(http)
    counted.subtract(before)
    by_code: Counter[str] = Counter()
    for (code, _), count in counted.items():
        by_code[code] += count
    assert by_code["200"] == 2  # one answer, and the first look at /metrics
    for status, count in Counter(str(each.status_code) for each in sent[1:]).items():
        assert by_code[status] == count
    reasons = {reason for (code, reason), count in counted.items() if count and code != "200"}
    assert {"model_not_found", "invalid_image", "not_found", "method_not_allowed"} <= reasons
    assert "" not in reasons


def test_a_request_without_a_key_is_counted() -> None:
    options = ServerOptions(port=0, served_model_name=("demo",), api_key="secret")
    with serving(options) as served:
        assert served.http.get("/v1/models", headers={"authorization": ""}).status_code == 401
        key = {"authorization": "Bearer secret"}
        text = served.http.get("/metrics", headers=key).text
        assert 'saccade_http_responses_total{code="401",reason="invalid_api_key"} 1.0' in text


def test_metrics_name_the_release_and_the_process(module_server: Served) -> None:
    http = module_server.http
    assert samples(http, "saccade_build_info") == {("demo", __version__): 1}
    for name in ("process_resident_memory_bytes", "process_start_time_seconds"):
        assert samples(http, name)[()] > 0


def test_the_queue_time_of_each_answer_is_observed(module_server: Served) -> None:
    http = module_server.http
    before = samples(http, "saccade_queue_seconds_count")[()]
    for _ in range(2):
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert samples(http, "saccade_queue_seconds_count")[()] == before + 2


@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz", "/livez", "/ping"])
def test_probes_need_no_key(path: str, module_server: Served) -> None:
    assert module_server.http.get(path, headers={"authorization": ""}).json()["status"] == "ready"
