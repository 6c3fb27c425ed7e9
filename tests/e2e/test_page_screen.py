"""A screen that is watched on the page at /, in a headless Chromium: a canvas stands for the
screen, whose stream is the browser's own.

With PAGE_SCREENSHOTS=FOLDER, what was seen is kept there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saccade_bench.fixtures.server import Server
from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import ask, browser, keep, page, server
from tests.e2e.test_page_answers import set_field
from tests.e2e.test_page_chats import SAVED, menu, new_chat, saved, take
from tests.e2e.test_page_files import STATE
from tests.e2e.test_page_use import FAKE, notice, press, reload

__all__ = ["browser", "page", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
SCREEN = """(() => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [640, 360];
  const pen = canvas.getContext("2d");
  let shown = 0;
  window.draw = (x) => { shown = x };
  const paint = () => {
    pen.fillStyle = "#f5f5f2";
    pen.fillRect(0, 0, 640, 360);
    pen.fillStyle = "#e01c20";
    pen.beginPath();
    pen.arc(90 + shown, 180, 70, 0, 2 * Math.PI);
    pen.fill();
    requestAnimationFrame(paint);
  };
  paint();
  navigator.mediaDevices.getDisplayMedia = async () => (window.stream = canvas.captureStream(10));
  window.realFetch ??= window.fetch;
  window.sent = [];
  window.fetch = (path, options) => {
    if (options?.body) sent.push(JSON.parse(options.body));
    return realFetch(path, options);
  };
})()"""
WORDS = "document.getElementById('screen-words').textContent"
SUMMARY = "document.querySelector('#talk .turn:last-child .trace summary').textContent"
WATCHING = "!document.getElementById('watching').hidden"
OFFERED = "document.getElementById('watch').checkVisibility()"
FRAMES = "sent.at(-1).messages[0].content[0].video.length"


def watch(page: Browser) -> None:
    page.wait_for(OFFERED)
    page.run("document.getElementById('watch').click()")
    page.wait_for(WATCHING)


def asked(page: Browser) -> list[dict[str, Any]]:
    """The bodies of the questions that were sent, without what was only made ready."""
    return [body for body in page.run("sent") if body.get("max_tokens") != 0]


@pytest.fixture(autouse=True)
def stopped(page: Browser) -> Any:
    page.run(SCREEN)
    yield
    page.run("document.getElementById('unwatch').click()")


def test_a_screen_is_watched_and_what_it_showed_is_not_read_again(
    page: Browser, server: Server, tmp_path: Path
) -> None:
    encoded = server.metric("saccade_images_encoded_total")
    watch(page)
    page.wait_for(f"{WORDS}.includes('1 new moment of video; encoded in ')")
    for x in (120, 240, 360):
        before = page.run("sent.length")
        page.run(f"draw({x})")
        page.wait_for(f"sent.length > {before} + 1")
    page.wait_for(f"/^[0-9]+ moments of video: [0-9]+ cached, [0-9]+ new;/.test({WORDS})")
    first = ask(page, "What is on the screen?")
    assert first
    keep(page, "page-screen.png", tmp_path)
    assert "moments of video" in page.run(SUMMARY)
    (body,) = asked(page)
    video, words = body["messages"][0]["content"]
    assert words == {"type": "text", "text": "What is on the screen?"}
    assert video["type"] == "video" and video["fps"] == 1 and video["max_pixels"] == 262_144
    assert len(video["video"]) % 2 == 0
    assert all(frame.startswith("data:image/jpeg;base64,") for frame in video["video"])
    # It grows where it stands.
    page.wait_for(f"{FRAMES} > {len(video['video'])}")
    ask(page, "And now?")
    later = asked(page)[-1]["messages"]
    assert [each["role"] for each in later] == ["user", "assistant", "user"]
    assert later[0]["content"][0]["video"][: len(video["video"])] == video["video"]
    assert len(later[0]["content"][0]["video"]) > len(video["video"])
    assert later[2]["content"] == "And now?", "one video, and not another"
    assert "cached" in page.run(SUMMARY)
    pairs = {
        tuple(body["messages"][0]["content"][0]["video"][i : i + 2])
        for body in page.run("sent")
        for i in range(0, len(body["messages"][0]["content"][0]["video"]), 2)
    }
    assert server.metric("saccade_images_encoded_total") - encoded <= len(pairs)
    assert not page.complaints


def test_watching_ends_with_the_button_or_in_the_browsers_own_way(page: Browser) -> None:
    for end in (
        "document.getElementById('unwatch').click()",
        "stream.getTracks()[0].dispatchEvent(new Event('ended'))",
    ):
        watch(page)
        assert not page.run(OFFERED)
        page.wait_for("sent.length")
        page.run(end)
        assert not page.run(WATCHING) and page.run(OFFERED)
        assert page.run("stream.getTracks().every(({readyState}) => readyState === 'ended')")
    ask(page, "Hi")
    assert asked(page)[-1]["messages"] == [{"role": "user", "content": "Hi"}], (
        "nothing goes with it"
    )


def test_a_user_who_refuses_hears_nothing_and_another_failure_is_said(page: Browser) -> None:
    for name in ("NotAllowedError", "NotFoundError"):
        page.run(
            "navigator.mediaDevices.getDisplayMedia = async () => {"
            f"throw new DOMException('no screen', '{name}') }}"
        )
        page.run("document.getElementById('watch').click()")
        page.run("new Promise((resolve) => setTimeout(resolve))")
        assert not page.run(WATCHING)
        if name == "NotAllowedError":
            assert page.run("document.getElementById('notice').hidden")
    assert "no screen" in notice(page)


def test_the_video_keeps_to_what_the_model_has_room_for(page: Browser) -> None:
    page.run((STATE % '["images", "frames"], context_length: 900').replace("looks", "looks2"))
    page.wait_for("window.looks2 > 1")
    watch(page)
    page.wait_for("sent.length > 4")
    assert max(len(body["messages"][0]["content"][0]["video"]) for body in page.run("sent")) == 4


def test_a_pair_that_is_refused_ends_it(page: Browser) -> None:
    error = json.dumps({"error": {"message": "too many tokens", "param": "messages"}})
    refuse = f"() => (sent.push(JSON.parse(options.body)), new Response({json.dumps(error)}, NO))"
    page.run(FAKE % refuse.replace("NO", "{status: 400}"))
    page.wait_for(OFFERED)
    page.run("document.getElementById('watch').click()")
    assert notice(page) == "Screen sharing stopped: too many tokens"
    lengths = [len(body["messages"][0]["content"][0]["video"]) for body in page.run("sent")]
    assert lengths == [2], "there is no less than a pair"
    assert not page.run(WATCHING)


@pytest.mark.parametrize(
    "how",
    [
        "navigator.mediaDevices.getDisplayMedia = undefined",
        "void Object.defineProperty(window, 'isSecureContext', {value: false})",
        STATE % '["images"]',
    ],
)
def test_a_screen_is_offered_only_where_it_can_be_watched(page: Browser, how: str) -> None:
    page.wait_for(OFFERED)
    page.run(how)
    page.wait_for(f"!{OFFERED}")
    reload(page)


def test_a_watched_conversation_is_kept_and_exported_with_its_frames(page: Browser) -> None:
    watch(page)
    ask(page, "What is on the screen?")
    page.run("document.getElementById('unwatch').click()")
    page.run(SAVED)
    menu(page, "What is on the screen?", "Export as JSON")
    text = saved(page)
    new_chat(page)
    take(page, "saved.json", text)
    page.wait_for("document.querySelectorAll('.turn').length === 2")
    assert page.run("document.querySelectorAll('.user .thumbnail img').length") == 1
    ask(page, "And now?")
    assert page.run(SUMMARY).startswith("2 cached moments of video; ")


def test_enter_in_an_empty_box_asks_nothing(page: Browser) -> None:
    watch(page)
    set_field(page, "question", "")
    page.run("document.getElementById('question').focus()")
    press(page, "Enter")
    assert page.run("document.querySelectorAll('.turn').length") == 0
