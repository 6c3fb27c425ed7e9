"""The drawn desktop: the tiles that an event changes, for each family."""

from __future__ import annotations

import os
import threading

import pytest

from saccade_bench.screens.__main__ import new_rows
from saccade_bench.screens.desktop import EVENTS, QUIET, screenshot
from saccade_bench.screens.layouts import FAMILIES
from saccade_bench.screens.photos import cpu_seconds

NEW = {
    "InternVL3": (2 * 1025, 7 * 1025),
    "SmolVLM2, Idefics3": (2 * 1024, 10 * 1024),
    "Step3-VL-10B": (36**2 + 52**2, 6 * 36**2 + 52**2),
    "MiniCPM-V 4.6": (2080, 7200),
    "DeepSeek-VL2": (2 * 729, 7 * 729),
}
"""Rows of new tiles, including the whole image's: for a caret, and for a page that scrolls."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_caret_costs_a_tile_and_the_whole_image(family: str) -> None:
    layout, quiet = FAMILIES[family].layout, screenshot(QUIET)
    found = [
        new_rows(layout, quiet, screenshot(EVENTS[name]))[0] for name in ("caret", "page scroll")
    ]
    assert tuple(found) == NEW[family]


@pytest.mark.parametrize("name", EVENTS)
def test_a_jpeg_changes_in_the_same_tiles(name: str) -> None:
    layout = FAMILIES["DeepSeek-VL2"].layout
    png, jpeg = (
        new_rows(layout, screenshot(QUIET, format), screenshot(EVENTS[name], format))
        for format in ("PNG", "JPEG")
    )
    assert png == jpeg


def test_cpu_seconds_count_every_thread() -> None:
    before, waits = cpu_seconds(os.getpid()), threading.Event()
    done = threading.Event()

    def compute() -> None:
        while cpu_seconds(os.getpid()) < before + 0.05:
            sum(range(10_000))
        done.set()
        waits.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    assert done.wait(60) and cpu_seconds(os.getpid()) >= before + 0.05
    waits.set()
    thread.join()
