"""The page at /, in a headless Chromium, against the demo model.

With PAGE_SCREENSHOTS=FOLDER, what was seen is kept there (README shows it).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from saccade.demo.run import QUESTIONS
from saccade_bench.fixtures.server import Server, serving
from tests.e2e.chromium import CHROMIUM, Browser, browsing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
KEY = "open sesame"
GIVE = """(() => {
  const transfer = new DataTransfer();
  for (const [name, data] of %s)
    transfer.items.add(new File(
      [Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, {type: "image/png"}));
  %s
})()"""
DROP = 'document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}))'
PASTE = (
    "document.getElementById('question').dispatchEvent("
    'new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true}))'
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    kept = ("--kv-cache-dir", str(folder / "kv"))
    with serving("demo", folder, "--max-total-tokens", "16384", *kept) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    """The page as it is when it has just been opened, without a complaint."""
    browser.complaints.clear()
    browser.open(f"{server.url}/")
    browser.wait_for("document.getElementById('status').textContent === 'ready'")
    browser.wait_for("'ready' in document.body.dataset")
    browser.run("document.getElementById('clear').click()")
    return browser


def give(page: Browser, how: str, images: Sequence[Path]) -> None:
    """Drop or paste images, and wait for their thumbnails."""
    read = [base64.b64encode(image.read_bytes()).decode() for image in images]
    files = [(f"{i}.png", encoded) for i, encoded in enumerate(read)]
    page.run(GIVE % (json.dumps(files), how))
    page.wait_for(f"document.querySelectorAll('#tray img').length === {len(files)}")


def ask(page: Browser, question: str) -> str:
    """The answer, once all of it is there."""
    before = page.run("document.querySelectorAll('.assistant').length")
    page.run(f"document.getElementById('question').value = {json.dumps(question)}")
    page.run("document.getElementById('send').click()")
    page.wait_for(
        f"document.querySelectorAll('.assistant').length > {before} && "
        "document.querySelector('#talk .turn:last-child').dataset.done === ''"
    )
    answer: str = page.run(
        "document.querySelector('#talk .turn:last-child .text').textContent.trim()"
    )
    return answer


def found(page: Browser) -> list[str]:
    """Where the images of the last answer were found."""
    places: list[str] = page.run(
        "[...document.querySelectorAll('#talk .turn:last-child .image')]"
        ".map((each) => each.dataset.found)"
    )
    return places


def keep(page: Browser, name: str, tmp_path: Path) -> None:
    path = Path(os.environ.get("PAGE_SCREENSHOTS", tmp_path)) / name
    page.run("new Promise((resolve) => setTimeout(resolve, 1500))")  # the live view looks again
    page.screenshot(path)
    assert 5_000 < path.stat().st_size < 200_000


def test_dropped_images_are_asked_about_and_the_page_says_where_they_were_found(
    page: Browser, tmp_path: Path
) -> None:
    first, second, *_ = QUESTIONS
    give(page, DROP, first.images)
    assert ask(page, first.question) == first.answer
    assert found(page) == ["new"]
    stages = page.run("[...document.querySelectorAll('.lane .stage')].map((each) => each.title)")
    for stage in ("prefill", "decode", "fetching", "decoding", "encoding"):
        assert any(words.startswith(f"{stage}: ") for words in stages), stage
    assert page.run("document.querySelectorAll('.trace .thumbnail img').length") == 1
    assert page.run("document.querySelector('.trace').open") is False
    assert page.run("document.querySelector('.trace summary').textContent").startswith(
        "1 new image; "
    )
    give(page, PASTE, second.images)
    assert ask(page, second.question) == second.answer
    assert found(page) == ["cached: KV", "new"]
    page.run("document.querySelector('#talk .turn:last-child .trace').open = true")
    page.run("document.querySelector('#talk .turn:last-child').scrollIntoView(false)")
    keep(page, "page.png", tmp_path)
    # The same image after other words: its embedding is there.
    page.run("document.getElementById('clear').click()")
    give(page, DROP, [*second.images, *first.images])
    ask(page, "Which picture has a number in it?")
    assert found(page) == ["cached: embedding"] * 2
    keep(page, "page-again.png", tmp_path)
    shown = page.run("document.getElementById('live').textContent")
    assert page.run("document.querySelectorAll('#first-figures .figure').length") == 3
    assert not page.run("document.getElementById('more-figures').open")
    assert "KV pages" in shown and "in device memory" in shown
    assert "from an encoder" in shown
    assert "tokens loaded" in shown, "the tiers of KV, too"
    assert not page.complaints


def test_text_stays_text(page: Browser) -> None:
    ask(page, "<img src=x onerror=alert(1)><b>Hi</b>")
    assert page.run("document.querySelector('.user .text').children.length") == 0
    assert not page.complaints


def test_a_refused_question_can_be_asked_again(page: Browser) -> None:
    broken = [["broken.png", base64.b64encode(b"no image").decode()]]
    page.run(GIVE % (json.dumps(broken), DROP))
    page.wait_for("!document.getElementById('notice').hidden")
    page.run("document.querySelector('#notice button').click()")  # add anyway
    page.wait_for("document.querySelectorAll('#tray .tile').length === 1")
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    words = page.wait_for("document.querySelector('#notice:not([hidden]) span')?.textContent")
    assert words.startswith("broken.png: ") and "messages[" not in words
    page.wait_for("document.getElementById('stop').hidden")
    assert page.run("document.getElementById('question').value") == "Hi"
    assert page.run("document.querySelectorAll('.turn').length") == 0
    page.run("document.querySelector('#tray .away').click()")
    assert page.run("document.getElementById('notice').hidden")
    assert ask(page, "Hi") and page.run("document.querySelectorAll('.turn').length") == 2


def test_the_page_asks_for_the_key(browser: Browser, tmp_path: Path) -> None:
    def give_key(key: str) -> None:
        browser.wait_for("document.getElementById('key-dialog').open")
        browser.run(f"document.getElementById('key').value = {json.dumps(key)}")
        browser.run("document.querySelector('#key-form button').click()")

    with serving("demo", tmp_path, "--api-key", KEY, "--max-total-tokens", "4096") as keyed:
        browser.open(f"{keyed.url}/")
        browser.wait_for("document.getElementById('status').textContent === 'API key required'")
        give_key("wrong")
        browser.wait_for("document.getElementById('key-reason').textContent")
        give_key(KEY)
        browser.wait_for("document.getElementById('status').textContent === 'ready'")
        assert ask(browser, "Hi")
        assert browser.run("sessionStorage.getItem('saccade-key')") == KEY
        browser.open("about:blank")


def test_a_session_of_saccade_chat_says_where_its_image_was_found(
    server: Server, tmp_path: Path
) -> None:
    first = QUESTIONS[2]
    path = shutil.copy(first.images[0], tmp_path / "image.png")
    lines = f"/image {path}\n{first.question}\nAnd now?\n"
    command = [sys.executable, "-m", "saccade", "chat", "--base-url", server.url]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    told = [line.split(")")[1] for line in done.stdout.splitlines() if "image 1 (" in line]
    assert [each.split(",")[0].split(";")[0] for each in told] == [
        " new",
        " cached: KV",
    ]


def test_the_description_is_shown_within_its_own_policy(browser: Browser, server: Server) -> None:
    browser.complaints.clear()
    browser.open(f"{server.url}/docs")
    browser.wait_for("!document.getElementById('operations').hasAttribute('aria-busy')")
    shown = browser.run(
        "[...document.querySelectorAll('.operation')].map(({id}) => { "
        "document.getElementById(id).open = true; return id })"
    )
    described = httpx.get(f"{server.url}/openapi.json").json()["paths"].values()
    assert {*shown} == {each["operationId"] for path in described for each in path.values()}
    chat = "document.getElementById('post_chat_completions')"
    browser.wait_for(f"{chat}.innerText.includes('Which colour is the square?')")
    assert browser.run(f"{chat}.querySelector('pre.curl').innerText").startswith("curl ")
    assert "max_completion_tokens" in browser.run(f"{chat}.innerText")
    models = "document.getElementById('get_models')"
    browser.run(f"{models}.querySelector('form').requestSubmit()")
    browser.wait_for(f"{models}.querySelector('pre.answer').innerText.includes('object')")
    assert browser.complaints == []
