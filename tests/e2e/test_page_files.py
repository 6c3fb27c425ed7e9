"""Files on the page at /, in a headless Chromium: PDFs, damaged images, those that the server alone
can read, and what is left out.

With PAGE_SCREENSHOTS=FOLDER, what was seen is kept there.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from saccade.plugins.documents import has_renderer
from saccade_bench.fixtures.pdf import Sheet, pdf
from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import DROP as DROPPED
from tests.e2e.test_page import GIVE, ask, browser, keep, page, server
from tests.e2e.test_page_hands import phone
from tests.e2e.test_page_use import answer_with, notice, reload
from tests.e2e.test_page_video import DROP

__all__ = ["browser", "page", "phone", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
SUMMARY = "document.querySelector('#talk .turn:last-child .trace summary').textContent"
TRAY = "[...document.querySelectorAll('#tray .waiting')].map((each) => each.textContent)"
NOTICES = "[...document.querySelectorAll('#notice span')].map((each) => each.textContent)"
STATE = """(() => {
  const real = window.fetch;
  window.fetch = async (path, options) => {
    const answer = await real(path, options);
    if (path !== "saccade/state") return answer;
    window.looks = (window.looks ?? 0) + 1;
    return new Response(JSON.stringify({ ...(await answer.json()), takes: %s }));
  };
})()"""


def drop(page: Browser, data: bytes, name: str, kind: str = "") -> None:
    text = base64.b64encode(data).decode()
    page.run(DROP % tuple(json.dumps(each) for each in (text, name, kind)))


def written(kind: str, **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (120, 160, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(noise).save(file, kind, **options)
    return file.getvalue()


def send(page: Browser, question: str) -> None:
    page.run(f"document.getElementById('question').value = {json.dumps(question)}")
    page.run("document.getElementById('send').click()")


@pytest.mark.skipif(not has_renderer(), reason="the extra documents is not installed")
def test_a_pdf_is_asked_about_and_its_pages_are_known_the_second_time(
    page: Browser, tmp_path: Path
) -> None:
    drop(page, pdf([Sheet(["one"]), Sheet(["two"])]), "report.pdf", "application/pdf")
    page.wait_for(f"JSON.stringify({TRAY}) === JSON.stringify(['PDFreport.pdf×'])")
    ask(page, "What is on page 1?")
    assert page.run(SUMMARY).startswith("2 new pages; first token ")
    ask(page, "And on page 2?")
    assert page.run(SUMMARY).startswith("2 cached pages; ")
    page.run("document.querySelector('#talk .turn:last-child .trace').open = true")
    row = "document.querySelector('#talk .turn:last-child .trace .video').textContent"
    assert page.run(row).endswith("report.pdf")
    assert page.run("document.querySelectorAll('.trace .image').length") == 0
    keep(page, "page-pdf.png", tmp_path)
    reload(page)
    assert page.run("document.querySelector('.user .tile').textContent") == "PDFreport.pdf"
    ask(page, "And now?")
    assert page.run(SUMMARY).startswith("2 cached pages; "), "the file is kept, too"
    assert not page.complaints


@pytest.mark.parametrize(
    "name, kind, takes, why",
    [
        ("a.pdf", "application/pdf", ["images"], 'needs the extra "documents"'),
        ("a.heic", "image/heic", ["images"], 'needs the extra "heic"'),
        ("a.mp4", "video/mp4", ["images", "frames"], 'needs the extra "video"'),
        ("a.mp4", "video/mp4", ["images"], "this model does not support videos"),
        ("a.png", "image/png", [], "this model does not support images"),
        ("a.docx", "", ["images"], "supported are images"),
    ],
)
def test_a_file_that_this_server_cannot_read_is_named_with_the_reason(
    page: Browser, name: str, kind: str, takes: list[str], why: str
) -> None:
    page.run(STATE % json.dumps(takes))
    page.wait_for("window.looks > 1")  # the page has read the first
    drop(page, b"x", name, kind)
    words = notice(page)
    assert words.startswith(f"{name} was not added: ") and why in words
    assert page.run(TRAY) == []


def test_what_was_left_out_is_said_until_it_is_dismissed_and_nothing_goes_without_it(
    page: Browser,
) -> None:
    answer_with(page, "Hello")
    drop(page, b"x", "notes.docx")
    assert notice(page).startswith("notes.docx was not added")
    drop(page, b"", "empty.png", "image/png")
    drop(page, written("PNG"), "good.png", "image/png")
    page.wait_for(f"{TRAY}.length === 1")
    assert len(page.run(NOTICES)) == 2, "another file takes no notice away"
    send(page, "What is in the notes?")
    page.wait_for(f"{NOTICES}.length === 3")
    assert page.run(NOTICES)[2] == "The question was not sent."
    send(page, "What is in the notes?")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.run("document.getElementById('question').value") == "What is in the notes?"
    page.run("document.querySelector('#notice p:last-child button').click()")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    assert page.run(NOTICES) == []
    # Who dismisses the notice knows of it.
    drop(page, b"x", "more.docx")
    page.run("document.querySelector('#notice .away').click()")
    send(page, "And now?")
    page.wait_for("document.querySelectorAll('.assistant[data-done]').length === 2")


def damaged() -> list[tuple[str, bytes]]:
    """Cut in half, or with a changed middle, or no image at all."""
    cut = [(kind, written(kind)) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    files = [(f"cut.{kind.lower()}", data[: len(data) // 2]) for kind, data in cut]
    changed = bytearray(cut[0][1])
    changed[len(changed) // 2] ^= 0x5A
    return [*files, ("changed.png", bytes(changed)), ("text.png", b"no image")]


@pytest.mark.parametrize("name, data", damaged(), ids=[name for name, _ in damaged()])
def test_a_damaged_image_is_told_when_it_is_dropped(page: Browser, name: str, data: bytes) -> None:
    drop(page, data, name, "image/png")
    assert notice(page) == (
        f"{name} was not added: this browser cannot read the image; it may be damaged."
    )
    assert page.run(TRAY) == []
    page.run("document.querySelector('#notice button').click()")
    page.wait_for(f"{TRAY}.length === 1"), "the user may know better"
    assert page.run(NOTICES) == []


def test_an_image_that_the_server_alone_can_read_is_taken(page: Browser) -> None:
    drop(page, written("TIFF"), "scan.tiff", "image/tiff")
    page.wait_for(f"JSON.stringify({TRAY}) === JSON.stringify(['TIFFscan.tiff×'])")
    assert page.run(NOTICES) == []
    ask(page, "Hi")
    assert page.run(SUMMARY).startswith("1 new image; ")


def test_the_tray_is_one_row_that_scrolls_sideways(phone: Browser, tmp_path: Path) -> None:
    files = []
    for i in range(4):
        file = io.BytesIO()
        PIL.Image.new("RGB", (160, 120), (60 * i, 90, 160)).save(file, "PNG")
        files.append((f"{i}.png", base64.b64encode(file.getvalue()).decode()))
    phone.run(GIVE % (json.dumps(files), DROPPED))
    phone.wait_for("document.querySelectorAll('#tray img').length === 4")
    keep(phone, "page-tray.png", tmp_path)
    boxes = phone.run(
        "[...document.querySelectorAll('#tray .waiting')]"
        ".map((each) => each.getBoundingClientRect().top)"
    )
    assert len(boxes) == 4 and len(set(boxes)) == 1, "one row"
    assert phone.run("(({scrollWidth, clientWidth}) => scrollWidth > clientWidth)(tray)")
    assert phone.run("(({scrollHeight, clientHeight}) => scrollHeight <= clientHeight)(tray)")
    assert phone.run("document.documentElement.scrollWidth") == 390
    phone.run("document.querySelector('#tray .waiting .away').focus()")
    assert phone.run("document.querySelector('#tray .away').getBoundingClientRect().x >= 0")
