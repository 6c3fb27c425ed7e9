"""Renders all declared metrics for `/metrics`, in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from saccade.core.metrics import SECONDS, Metrics

CONTENT_TYPE = CONTENT_TYPE_LATEST
ADAPTERS, STATES = "saccade_adapter_requests", ("running", "waiting")
LORA_INFO = "saccade_lora_requests_info"


class _Declared(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        found = self._metrics.snapshot()
        for metric, values in found.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
        named = {metric.name: values for metric, values in found.items()}
        if ADAPTERS in named:
            yield _adapters(named[ADAPTERS], named["saccade_adapters_max"][()])
        for metric, histogram in self._metrics.histograms().items():
            bounds = [*map(str, SECONDS), "+Inf"]
            yield HistogramMetricFamily(
                metric.name,
                metric.help,
                buckets=list(zip(bounds, accumulate(histogram.counts), strict=True)),
                sum_value=histogram.sum,
            )


def _adapters(requests: Mapping[tuple[str, ...], float], most: float) -> GaugeMetricFamily:
    """Return vLLM's metric of active LoRA adapters, which routers read.

    requests: the number of requests by (adapter, state).
    most: the maximum number of adapters.

    The adapters' names are in labels. The value is the current time, so that readers can select the
    newest sample.
    """
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(
        LORA_INFO, "Adapters with running and waiting requests, at this time", labels=labels
    )
    busy = sorted((state, name) for (name, state), count in requests.items() if count)
    listed = (",".join(name for at, name in busy if at == state) for state in STATES)
    family.add_metric([str(int(most)), *listed], time.time())
    return family


def render(metrics: Metrics) -> bytes:
    """Return all metrics in `metrics`, and those of this process, in the format of
    `CONTENT_TYPE`.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Declared(metrics))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
