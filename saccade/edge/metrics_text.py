"""`/metrics`: the declared metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
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


class _Declared(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for metric, values in self._metrics.snapshot().items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
        for metric, histogram in self._metrics.histograms().items():
            bounds = [*map(str, SECONDS), "+Inf"]
            yield HistogramMetricFamily(
                metric.name,
                metric.help,
                buckets=list(zip(bounds, accumulate(histogram.counts), strict=True)),
                sum_value=histogram.sum,
            )


def render(metrics: Metrics) -> bytes:
    """Render all metrics, and those of this process, in the format that `CONTENT_TYPE` names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Declared(metrics))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
