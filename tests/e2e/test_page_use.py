"""What a user, and whoever means a user ill, does with the page at /, in a headless Chromium."""

from __future__ import annotations

import json

import pytest

from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import ask, browser, page, server

__all__ = ["browser", "page", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg><script>window.hacked=1</script></svg><svg onload=window.hacked=1>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "[a](javascript:window.hacked=1) [b](JaVaScRiPt&#58;window.hacked=1) [c](data:text/html,x)",
    "![x](javascript:window.hacked=1) ![y](https://example.org/seen.png) ![z](data:image/png,x)",
    '[a](<https://example.org/" onmouseover="window.hacked=1>) [b](vbscript:x) [c](//example.org)',
    "<form id=ask name=body><input name=attributes></form><a id=talk name=scroll href=x>x</a>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=1&gt;'>",
    "| a |\n|---|\n| <img src=x onerror=window.hacked=1> |",
    "```html\n<script>window.hacked=1</script>\n```\n`<img src=x onerror=window.hacked=1>`",
    "<style>body{display:none}</style><link rel=stylesheet href=x><base href=https://example.org>",
    "<https://example.org> <javascript:window.hacked=1> ftp://example.org <details open ontoggle=1>",
)
BAD = """[...%s.querySelectorAll("*")].filter((each) =>
  !"p br hr h1 h2 h3 h4 h5 h6 strong em del code pre blockquote ul ol li table thead tbody tr th td a div button"
    .split(" ").includes(each.localName) || each.id || each.hasAttribute("name")
  || [...each.attributes].some(({ name }) => name.startsWith("on"))
  || (each.hasAttribute("href") && !/^(https?:\\/\\/|mailto:)/i.test(each.getAttribute("href"))))
  .map((each) => each.outerHTML)"""
FAKE = """(() => {
  window.realFetch ??= window.fetch;
  window.fetch = async (path, options) =>
    String(path).includes("chat/completions") ? (%s)() : window.realFetch(path, options);
})()"""


def answer_with(page: Browser, text: str, end: str = "data: [DONE]\n\n") -> None:
    """The server's next answers are `text`."""
    chunk = "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}) + "\n\n"
    page.run(FAKE % f"() => new Response({json.dumps(chunk + end)})")


def drop(page: Browser, name: str, kind: str) -> None:
    page.run(
        "(() => { const transfer = new DataTransfer(); transfer.items.add("
        f"new File(['x'], {json.dumps(name)}, {{type: {json.dumps(kind)}}}));"
        "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: transfer, bubbles: true}))"
        "})()"
    )


def notice(page: Browser) -> str:
    words: str = page.wait_for("document.querySelector('#notice:not([hidden]) span')?.textContent")
    return words


def reload(page: Browser) -> None:
    page.run("window.old = true")
    page.send("Page.reload")
    page.wait_for("!window.old && document.body?.dataset.ready === ''")


def press(page: Browser, key: str, *, shift: bool = False) -> None:
    code = {"Escape": 27, "Enter": 13, "Tab": 9}[key]
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        page.send(
            "Input.dispatchKeyEvent",
            type=kind,
            key=key,
            code=key,
            windowsVirtualKeyCode=code,
            modifiers=8 if shift else 0,
            **text,
        )


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_answer_becomes_nothing_that_runs_or_fetches(page: Browser, text: str) -> None:
    answer_with(page, text)
    ask(page, "Hi")
    assert page.run(BAD % "document.querySelector('.assistant .text')") == []
    assert not page.complaints
    # The second fence by itself; its parser grumbles of what the policy keeps from running.
    page.run(
        "import('/page/markdown.js').then(({sanitised}) => "
        f"{{ window.box = document.createElement('div'); box.append(sanitised({json.dumps(text)})) }})"
    )
    assert page.run(BAD % "window.box") == []
    assert page.run(
        "window.hacked === undefined && document.getElementById('ask').localName === 'form'"
    )


def test_a_hostile_file_name_and_error_stay_text(page: Browser) -> None:
    name = "<img src=x onerror=window.hacked=1>.png"
    drop(page, name, "image/png")
    assert notice(page).startswith(f"{name} was not added: this browser cannot read the image")
    page.run("document.querySelector('#notice button').click()")  # add anyway
    page.wait_for("document.querySelectorAll('#tray .tile').length === 1")
    body = json.dumps({"error": {"message": f"{name}: no", "param": "messages[0].content[0]"}})
    page.run(FAKE % f"() => new Response({json.dumps(body)}, {{status: 400}})")
    page.run("document.getElementById('send').click()")
    page.wait_for("document.querySelectorAll('.turn').length === 0")
    assert notice(page) == f"{name}: {name}: no"
    assert page.run("document.querySelectorAll('#notice img, #tray img').length") == 0
    assert page.run("window.hacked === undefined") and not page.complaints


def test_markdown_is_shown(page: Browser) -> None:
    answer_with(page, "**bold** and `code`\n\n| a | b |\n|---|---:|\n| 1 | 2 |\n\n```\nx = 1\n```")
    ask(page, "Hi")
    count = "document.querySelectorAll('.assistant .text %s').length"
    assert [
        page.run(count % tag) for tag in ("strong", "td[align=right]", "pre button, .code button")
    ] == [1, 1, 1]


def test_an_answer_that_broke_off_can_be_asked_for_again(page: Browser) -> None:
    answer_with(page, "Half an", end="")
    ask(page, "Hi")
    assert "incomplete" in page.run("document.querySelector('.assistant .error').textContent")
    answer_with(page, "Half and half")
    page.run("document.querySelector('.assistant .error button').click()")
    page.wait_for(
        "document.querySelector('.assistant .text').textContent.trim() === 'Half and half'"
    )


def test_a_question_that_reached_nobody_is_given_back_with_a_way_to_try_again(
    page: Browser,
) -> None:
    page.run(FAKE % "() => { throw new TypeError('Failed to fetch') }")
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    assert "cannot be reached" in notice(page)
    page.wait_for("document.getElementById('question').value === 'Hi'")
    answer_with(page, "Hello")
    page.run("document.querySelector('#notice button').click()")
    page.wait_for(
        "document.querySelector('.assistant[data-done] .text')?.textContent.trim() === 'Hello'"
    )


def test_a_length_that_no_answer_may_have_is_not_sent(page: Browser) -> None:
    page.run("document.getElementById('max-tokens').value = '-5'")
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    page.wait_for(
        "document.getElementById('max-tokens-wrong').textContent.startsWith('A whole number')"
    )
    assert page.run("document.querySelectorAll('.turn').length") == 0
    page.run("document.getElementById('max-tokens').value = '512'")


def test_the_example_is_answered_enlarged_edited_and_kept_over_a_reload(page: Browser) -> None:
    page.run("document.getElementById('try').click()")
    page.wait_for("document.querySelectorAll('.assistant[data-done]').length === 1")
    answer = page.run("document.querySelector('.assistant .text').textContent.trim()")
    assert "red circle" in answer
    page.run("document.querySelector('.user .thumbnail').click()")
    assert page.run("document.getElementById('viewer').open")
    press(page, "Escape")
    page.wait_for("!document.getElementById('viewer').open")
    reload(page)
    assert page.run("document.querySelectorAll('.turn').length") == 2
    assert page.run("document.querySelector('.assistant .text').textContent.trim()") == answer
    assert page.run("document.querySelectorAll('.trace .thumbnail img').length") == 1
    page.run("document.querySelector('.user .tools button').click()")
    press(page, "Enter")
    page.wait_for(
        "document.querySelector('.trace summary')?.textContent.startsWith('1 cached image; ')"
    )
    assert page.run("document.querySelectorAll('.turn').length") == 2
    page.run("document.getElementById('clear').click()")
    assert page.run("!document.getElementById('hint').hidden")
    reload(page)
    assert page.run("document.querySelectorAll('.turn').length") == 0
