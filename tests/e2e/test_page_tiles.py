"""The page shows which tiles of a screenshot were new, in a headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade_bench.fixtures.server import Server, serving
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.screens.desktop import EVENTS, QUIET, screenshot
from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import DROP, ask, browser, give, keep, page

__all__ = ["browser", "page"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
TURN = "#talk .turn:last-child"
MARKS = f"""[...document.querySelectorAll('{TURN} .marked i')].map((mark) => {{
  const [inner, outer] = [mark, mark.parentElement].map((each) => each.getBoundingClientRect());
  return [
    (inner.top - outer.top) / outer.height, (inner.left - outer.left) / outer.width,
    (inner.bottom - outer.top) / outer.height, (inner.right - outer.left) / outer.width,
  ].map((edge) => Math.round(100 * edge) / 100);
}})"""
"""Where the marks are drawn, in fractions of the picture."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_checkpoint("tiny-internvl", tmp_path_factory.mktemp("model") / "tiny")
    with serving(folder, tmp_path_factory.mktemp("log"), "--max-total-tokens", "4096") as server:
        yield server


def send(page: Browser, tmp_path: Path, name: str) -> None:
    shot = tmp_path / f"{name}.png"
    shot.write_bytes(screenshot(EVENTS.get(name, QUIET), "PNG"))
    give(page, DROP, [shot])
    ask(page, "What is on the screen?")
    page.run(f"document.querySelector('{TURN} .trace').open = true")


def told(page: Browser) -> list[str]:
    words: list[str] = page.run(
        f"[...document.querySelectorAll('{TURN} .tiles-told')].map((each) => each.textContent)"
    )
    return words


def test_the_new_tiles_of_a_screenshot_are_marked_where_they_are(
    page: Browser, tmp_path: Path
) -> None:
    """4 x 2 tiles and the whole picture, which is always new, and has no mark."""
    send(page, tmp_path, "quiet")
    assert told(page) == ["all 9 tiles are new"]
    assert page.run(MARKS) == []
    send(page, tmp_path, "menu")
    assert told(page) == ["2 of 9 tiles are new: 1 marked here and the thumbnail"]
    assert page.run(MARKS) == [[0, 0, 0.5, 0.25]]
    page.run(f"document.querySelector('{TURN} .marked').scrollIntoView({{block: 'center'}})")
    keep(page, "page-tiles.png", tmp_path)
    send(page, tmp_path, "page scroll")
    assert told(page)[0].startswith("7 of 9 tiles are new: 6 marked here")
    marks = page.run(MARKS)
    assert len(marks) == 6 and all(left >= 0.25 for _, left, _, _ in marks), marks
    assert not page.complaints
