"""Metrics are read from the page of any server."""

from __future__ import annotations

from saccade_bench.metrics import series, total

PAGE = """\
# HELP hits Pages found
# TYPE hits counter
hits{tier="host memory"} 3
hits{tier="disk"} 2.0
hits_total 7

<p>not a metric</p>
seconds NaN
"""


def test_values_are_found_by_name_and_labels() -> None:
    found = series(PAGE)
    assert found['hits{tier="host memory"}'] == 3 and found["hits_total"] == 7
    assert len(found) == 4


def test_a_total_is_of_one_metric_over_its_labels() -> None:
    assert total(series(PAGE), "hits") == 5
    assert total(series(PAGE), "absent") == 0


def test_a_page_of_another_server_has_no_metrics() -> None:
    assert series("<html>\n<body>404 not found</body>") == {}
