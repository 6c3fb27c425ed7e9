"""Metrics: declared once, counted exactly, handed on as what changed."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.core.metrics import DECLARED, SECONDS, Metrics


def test_names_are_declared_once() -> None:
    names = [metric.name for metric in DECLARED]
    assert len(names) == len(set(names))


def test_counting() -> None:
    metrics = Metrics()
    metrics.inc("saccade_images_decoded_total")
    metrics.inc("saccade_images_decoded_total", 2)
    metrics.inc("saccade_image_hits_total", level="kv")
    metrics.set("saccade_arena_bytes_in_use", 7)
    assert metrics.value("saccade_images_decoded_total") == 3
    assert metrics.value("saccade_image_hits_total", level="kv") == 1
    assert metrics.value("saccade_image_hits_total", level="embedding") == 0
    assert metrics.value("saccade_arena_bytes_in_use") == 7


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("saccade_no_such_total", {}),
        ("saccade_image_hits_total", {}),
        ("saccade_image_hits_total", {"tier": "kv"}),
    ],
)
def test_an_undeclared_name_or_label_is_a_bug(name: str, labels: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        Metrics().inc(name, **labels)


def test_another_process_hears_of_what_changed_and_only_of_that() -> None:
    engine, front = Metrics(), Metrics()
    engine.set("saccade_steps_total", 5)
    engine.set("saccade_image_hits_total", 2, level="kv")
    news = engine.changed()
    assert sorted(news) == [
        ("saccade_image_hits_total", ("kv",), 2),
        ("saccade_steps_total", (), 5),
    ]
    front.absorb(news)
    assert front.value("saccade_image_hits_total", level="kv") == 2
    assert engine.changed() == ()
    engine.set("saccade_steps_total", 0)
    front.absorb(engine.changed())
    assert front.value("saccade_steps_total") == 0


def test_a_histogram_counts_each_value_in_the_bucket_that_holds_it() -> None:
    metrics = Metrics()
    for value in (0.0005, SECONDS[0], SECONDS[3], 1e9):
        metrics.observe("saccade_ttft_seconds", value)
    found = {metric.name: histogram for metric, histogram in metrics.histograms().items()}[
        "saccade_ttft_seconds"
    ]
    assert found.counts[0] == 2
    assert found.counts[3] == 1
    assert found.counts[-1] == 1
    assert sum(found.counts) == 4
    assert found.sum == pytest.approx(0.0005 + SECONDS[0] + SECONDS[3] + 1e9)


def test_a_renamed_metric_is_listed_under_its_old_name_too() -> None:
    metrics = Metrics()
    metrics.inc("saccade_draft_tokens_total", 3, source="prompt")
    metrics.set("saccade_stored_responses", 2)
    values = {metric.name: (metric, found) for metric, found in metrics.snapshot().items()}
    assert values["saccade_guesses_total"][1] == {("prompt",): 3.0}
    assert values["saccade_responses_kept"][1] == {(): 2.0}
    assert values["saccade_responses_kept"][0].help == "Deprecated: use saccade_stored_responses"


def test_an_old_name_is_no_other_metrics_name() -> None:
    names = [name for metric in DECLARED for name in (metric.name, metric.old_name) if name]
    assert len(names) == len(set(names))
    assert sum(bool(metric.old_name) for metric in DECLARED) == 17
