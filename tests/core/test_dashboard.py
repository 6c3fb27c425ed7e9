"""The Grafana dashboard asks for metrics, and labels, that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from saccade.core.metrics import DECLARED, Metrics
from saccade.edge.metrics_text import render

BOARD = Path(__file__).parents[2] / "examples" / "grafana" / "saccade.json"
QUERY = re.compile(r"\b((?:saccade|process)_[a-z0-9_]+)")


def test_every_metric_of_the_dashboard_is_declared() -> None:
    board = json.loads(BOARD.read_text())
    declared = {metric.name: metric for metric in DECLARED}
    queries = [each["expr"] for panel in board["panels"] for each in panel["targets"]]
    queries += [
        variable["query"]["query"]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert len(queries) > 20
    for query in queries:
        names = QUERY.findall(query)
        assert names, query
        shown = set(re.findall(r"^# TYPE (process\w+)", render(Metrics()).decode(), re.MULTILINE))
        for name in {*names} - shown:
            histogram = declared.get(name.removesuffix("_bucket"))
            assert name in declared or (histogram and histogram.kind == "histogram"), name
            by = re.search(r"sum by \(([a-z]+)\)", query)
            if by and by[1] != "le":
                assert by[1] in declared[name].labels, query
            if name in declared:
                counter = declared[name].kind == "counter"
                assert not counter or "rate(" in query or "label_values" in query, query
