"""`/metrics` in Prometheus' text format."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from saccade.core.metrics import ROUTED, Metrics
from saccade.edge.metrics_text import LORA_INFO, render


def labels_of(metrics: Metrics, name: str) -> list[dict[str, str]]:
    families = text_string_to_metric_families(render(metrics).decode())
    return [
        sample.labels for family in families for sample in family.samples if sample.name == name
    ]


def test_busy_adapters_are_labels_of_one_series_as_vllm_has_them() -> None:
    metrics = Metrics()
    metrics.set("saccade_adapters_max", 4)
    none = {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert labels_of(metrics, LORA_INFO) == [none]
    metrics.set_all("saccade_adapter_requests", {"b": 1, "a": 2}, state="running")
    metrics.set_all("saccade_adapter_requests", {"c": 3}, state="waiting")
    busy = {"running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert labels_of(metrics, LORA_INFO) == [none | busy]
    metrics.set_all("saccade_adapter_requests", {"b": 1}, state="running")
    assert metrics.value("saccade_adapter_requests", adapter="a", state="running") == 0
    assert metrics.value("saccade_adapter_requests", adapter="c", state="waiting") == 3
    assert labels_of(metrics, LORA_INFO) == [none | busy | {"running_lora_adapters": "b"}]


def test_a_router_has_no_adapters() -> None:
    assert labels_of(Metrics(ROUTED), LORA_INFO) == []
