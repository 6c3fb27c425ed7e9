"""A video on the page at /, in a headless Chromium: dropped, played, asked about, and which of its
pairs had been seen.

With PAGE_SCREENSHOTS=FOLDER, what was seen is kept there.
"""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import av
import PIL.Image
import PIL.ImageDraw
import pytest

from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import ask, browser, keep, page, server
from tests.e2e.test_page_hands import phone, tab, tap
from tests.e2e.test_page_use import press, reload

__all__ = ["browser", "page", "phone", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
DROP = """(() => {
  const transfer = new DataTransfer();
  transfer.items.add(new File(
    [Uint8Array.from(atob(%s), (c) => c.charCodeAt(0))], %s, {type: %s}));
  document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
})()"""
SUMMARY = "document.querySelector('#talk .turn:last-child .trace summary').textContent"
PLAYS = (
    "(() => { const {videoWidth, duration, src} = document.querySelector('.user video');"
    "return src.startsWith('blob:') && videoWidth === 192 && duration })()"
)


def drop(page: Browser, data: bytes, name: str = "clip.webm", kind: str = "video/webm") -> None:
    text = base64.b64encode(data).decode()
    page.run(DROP % tuple(json.dumps(each) for each in (text, name, kind)))
    page.wait_for("document.querySelectorAll('#tray .waiting').length")


@cache
def film(seconds: int = 4) -> bytes:
    """A disc on its way, two frames a second. Every Chromium plays it; the past alone decides how a
    frame is coded, so a longer film begins with equal pixels.
    """
    made, told = io.BytesIO(), {"lag-in-frames": "0", "auto-alt-ref": "0", "deadline": "realtime"}
    with av.open(made, "w", format="webm") as file:
        stream: Any = file.add_stream("libvpx", rate=2, options=told)
        stream.width, stream.height, stream.pix_fmt = 192, 128, "yuv420p"
        stream.gop_size, stream.bit_rate = 1, 1_000_000
        stream.codec_context.thread_count = 1
        for second in range(2 * seconds):
            image = PIL.Image.new("RGB", (stream.width, stream.height), "#f5f5f2")
            x = 8 + 9 * second
            PIL.ImageDraw.Draw(image).ellipse((x, 40, x + 48, 88), "#e01c20")
            file.mux(stream.encode(av.VideoFrame.from_image(image)))
        file.mux(stream.encode())
    return made.getvalue()


def test_a_dropped_video_is_played_and_the_page_says_which_pairs_were_seen(
    page: Browser, tmp_path: Path
) -> None:
    drop(page, film())
    assert page.run("document.querySelectorAll('#tray video').length") == 1
    assert ask(page, "What number is in the picture?")
    assert page.run(SUMMARY).startswith("4 new moments of video; first token ")
    assert 3 < page.wait_for(PLAYS) < 5
    ask(page, "And now?")
    assert page.run(SUMMARY).startswith("4 cached moments of video; ")
    page.run("document.querySelector('#talk .turn:last-child .trace').open = true")
    row = "document.querySelector('#talk .turn:last-child .trace .video').textContent"
    assert page.run(row) == "4 cached: KVclip.webm"
    keep(page, "page-video.png", tmp_path)
    # No hand has touched the page: what has no sound may play at once.
    page.run("(() => { const film = document.querySelector('.user video');"
             "film.muted = true; return film.play() })()")  # fmt: skip
    page.wait_for("document.querySelector('.user video').currentTime > 0.5")
    reload(page)
    assert 3 < page.wait_for(PLAYS) < 5, "kept over a reload"
    # Another file, two seconds longer: its first pairs have the same pixels.
    page.run("document.getElementById('clear').click()")
    drop(page, film(6), "longer.webm")
    ask(page, "Describe it.")
    assert page.run(SUMMARY).startswith("6 moments of video: 4 cached, 2 new; ")
    assert not page.complaints


def test_a_video_without_a_player_is_shown_by_name_and_a_refusal_names_it(page: Browser) -> None:
    drop(page, b"no video", "broken.mkv", "")
    page.wait_for("document.querySelector('#tray .tile')?.textContent === 'MKVbroken.mkv'")
    page.run("document.getElementById('send').click()")
    words = page.wait_for("document.querySelector('#notice:not([hidden]) span')?.textContent")
    assert words.startswith("broken.mkv: ") and "video" in words and "messages[" not in words
    page.wait_for("document.querySelectorAll('#tray .waiting').length === 1")
    page.run("document.querySelector('#tray .away').click()")
    assert page.run("document.querySelectorAll('#tray .waiting').length") == 0
    assert "media" not in " ".join(page.complaints).lower()


def test_a_video_is_sent_and_played_by_keyboard_alone(page: Browser) -> None:
    drop(page, film())
    page.wait_for("document.querySelector('#tray video').readyState > 0")
    page.run("document.getElementById('question').focus()")
    page.send("Input.insertText", text="Hi")
    press(page, "Enter")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    page.run("document.getElementById('scroll').focus()")
    tab(page)
    assert page.run("document.activeElement === document.querySelector('.user video')")
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key=" ", code="Space", text=" ",
                  windowsVirtualKeyCode=32)  # fmt: skip
    page.wait_for("document.querySelector('.user video').currentTime > 0")


def test_a_finger_plays_a_video_within_the_phones_width(phone: Browser) -> None:
    drop(phone, film())
    phone.run("document.getElementById('question').value = 'Hi'")
    tap(phone, "document.getElementById('send')")
    phone.wait_for("document.querySelector('.assistant[data-done]')")
    assert phone.run("document.documentElement.scrollWidth") == 390
    assert phone.run("document.querySelector('.user video').playsInline")
    phone.wait_for("document.querySelector('.user video').readyState > 1")
    left, bottom = phone.run(
        "(({x, bottom}) => [x, bottom])(document.querySelector('.user video')"
        ".getBoundingClientRect())"
    )
    point = {"x": left + 26, "y": bottom - 49}  # the browser's own button
    phone.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
    phone.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    phone.wait_for("document.querySelector('.user video').currentTime > 0")
