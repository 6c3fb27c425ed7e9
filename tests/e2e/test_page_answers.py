"""What becomes of answers on the page at /, in a headless Chromium: stopped, copied, asked for
again, reasoned, cut off by a reload or by the death of a real server; and what is kept of them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from saccade_bench.fixtures.server import Server, serving, wait_until_ready
from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import ask, browser, page, server
from tests.e2e.test_page_use import FAKE, answer_with, notice, press, reload

__all__ = ["browser", "page", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
ANSWER = "document.querySelector('.assistant .text').textContent"
TURNS = "[...document.querySelectorAll('.turn .text')].map((each) => each.textContent.trim())"
TAB = "(sessionStorage['saccade-tab'] = 'made')"
HACK = "<img src=x onerror=window.hacked=1>"
NEVER = (
    "() => new Promise((_, no) => options.signal.addEventListener('abort', "
    "() => no(new DOMException('', 'AbortError'))))"
)
STREAM = """() => new Response(new ReadableStream({start(stream) {
  window.say = (delta) => stream.enqueue(new TextEncoder().encode(
    "data: " + JSON.stringify({choices: [{delta}]}) + "\\n\\n"));
  window.end = () => {
    stream.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n"));
    stream.close();
  };
}}))"""


LONGER = """(() => {
  window.realFetch ??= window.fetch;
  window.fetch = (path, options) => realFetch(path, options?.body
    ? { ...options, body: JSON.stringify({ ...JSON.parse(options.body), min_tokens: 4000 }) }
    : options);
})()"""
"""The real server is asked for more than the demo model has to say."""


def begin_long(page: Browser) -> None:
    """Ask for an answer of thousands of tokens, and wait until some of it is there."""
    page.run(LONGER)
    set_field(page, "max-tokens", "4000")
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    page.wait_for(f"document.querySelector('.assistant') && {ANSWER}.trim().length > 10")
    assert not page.run("document.getElementById('stop').hidden")


def set_field(page: Browser, name: str, value: str) -> None:
    page.run(
        f"(() => {{ const field = document.getElementById('{name}');"
        f"field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input')) }})()"
    )


@pytest.fixture(autouse=True)
def defaults(page: Browser) -> Iterator[None]:
    """The settings, which the browser keeps, as they were."""
    yield
    if page.run("location.protocol") == "http:":
        page.run("localStorage.removeItem('saccade-settings')")


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_a_stopped_answer_keeps_what_was_said_and_the_server_stops_too(
    page: Browser, server: Server, way: str
) -> None:
    before = server.metric("saccade_requests_total", outcome="abort")
    begin_long(page)
    if way == "Escape":
        press(page, "Escape")
    else:
        page.run("document.getElementById('stop').click()")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    assert page.run("document.querySelector('.assistant .small').textContent") == "Stopped."
    assert len(page.run(ANSWER)) > 10
    server.wait_for_metric("saccade_requests_total", before + 1, outcome="abort")
    server.wait_for_metric("saccade_requests_running", 0)
    assert page.run("document.getElementById('stop').hidden")
    assert not page.run("document.getElementById('send').hidden")


def test_a_question_stopped_before_the_first_word_stays_and_can_be_asked_again(
    page: Browser,
) -> None:
    page.run(FAKE % NEVER)
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    page.wait_for("document.querySelector('.waits')?.textContent.startsWith('Waiting')")
    press(page, "Escape")
    page.wait_for("document.getElementById('stop').hidden")
    assert page.run(TURNS) == ["Hi"]
    assert page.run("document.getElementById('question').value") == ""
    assert page.run("document.getElementById('notice').hidden")
    answer_with(page, "Hello")
    page.run("document.querySelector('.unanswered button').click()")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    assert page.run(TURNS) == ["Hi", "Hello"]
    # What is stopped in place of an answer that was there leaves that one.
    page.run(FAKE % NEVER)
    page.run("document.querySelector('.assistant .tools').lastChild.click()")
    page.wait_for("document.querySelector('.waits')?.textContent.startsWith('Waiting')")
    press(page, "Escape")
    page.wait_for("document.getElementById('stop').hidden")
    assert page.run(TURNS) == ["Hi", "Hello"]


def test_an_answer_and_its_code_are_copied_as_they_were_written(page: Browser) -> None:
    text = "Some **bold** and\n\n```python\nx = 1\n```"
    page.run(FAKE % STREAM)
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    page.wait_for("window.say !== undefined")
    page.run(f"say({{content: {json.dumps(text)}}}), end()")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    page.run(
        "window.copied = []; Object.defineProperty(navigator, 'clipboard', {configurable: true,"
        "value: {writeText: async (text) => { copied.push(text) }}})"
    )
    page.run("document.querySelector('.assistant footer .tools button').click()")
    page.run("document.querySelector('.code button').click()")
    page.wait_for("copied.length === 2")
    assert page.run("copied") == [text, "x = 1"]
    words = "document.querySelector('.assistant footer .tools button').textContent"
    page.wait_for(f"{words} === 'Copied'")
    page.wait_for(f"{words} === 'Copy'")


def test_copying_works_where_the_browser_offers_no_clipboard(page: Browser) -> None:
    ask(page, "Hi")
    page.run(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, value: undefined});"
        "document.execCommand = (what) => (window.copied = [what, document.activeElement.value])[0]"
    )
    page.run("document.querySelector('.assistant footer .tools button').click()")
    copied = page.wait_for("window.copied")
    assert copied[0] == "copy" and copied[1].strip() == page.run(ANSWER).strip()
    assert page.run("document.querySelectorAll('textarea.unseen').length") == 0


def test_an_answer_is_asked_for_again_in_its_place(page: Browser, server: Server) -> None:
    first = ask(page, "Hi")
    ask(page, "And now?")
    before = server.metric("saccade_requests_total", outcome="stop")
    page.run("document.querySelector('.assistant .tools').lastChild.click()")
    page.wait_for(
        "document.querySelectorAll('.turn').length === 2 && "
        "document.querySelector('.assistant[data-done]')"
    )
    assert page.run(ANSWER).strip() == first
    server.wait_for_metric("saccade_requests_total", before + 1, outcome="stop")


def test_reasoning_has_a_box_and_is_not_sent_back(page: Browser) -> None:
    page.run(FAKE % STREAM)
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    page.wait_for("window.say !== undefined")
    page.run(f"say({{reasoning_content: {json.dumps(HACK)}}})")
    page.wait_for("document.querySelector('.waits')?.textContent.startsWith('Reasoning')")
    assert page.run("document.querySelector('.thoughts div').textContent") == HACK
    page.run("say({content: 'Done.'}), end()")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    assert page.run(ANSWER).strip() == "Done."
    assert page.run("document.querySelector('.thoughts').open") is False
    assert page.run("document.querySelectorAll('.thoughts img, .waits').length") == 0
    page.run(FAKE % "() => { window.sent = options.body; throw new TypeError('no') }")
    page.run("document.getElementById('question').value = 'More'")
    page.run("document.getElementById('send').click()")
    sent = json.loads(page.wait_for("window.sent"))
    assert sent["messages"][1] == {"role": "assistant", "content": "Done."}


def test_nothing_moves_when_an_answer_begins_grows_and_ends(page: Browser) -> None:
    page.run(FAKE % STREAM)
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    page.wait_for("window.say !== undefined")
    height = "document.querySelector('.assistant').getBoundingClientRect().height"
    empty = page.run(height)
    page.wait_for("document.querySelector('.waits')?.textContent")
    waiting = page.run(height)
    page.run("say({content: 'One line.'})")
    page.wait_for(f"{ANSWER}.trim() === 'One line.'")
    grown = page.run(height)
    page.run("end()")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    heights = [empty, waiting, grown, page.run(height)]
    assert max(heights) - min(heights) <= 3, heights


# ---- reloads


def test_a_reload_in_mid_answer_offers_to_ask_again(page: Browser, server: Server) -> None:
    begin_long(page)
    reload(page)
    assert page.run(TURNS) == ["Hi"]
    server.wait_for_metric("saccade_requests_running", 0)
    page.run("document.querySelector('.unanswered button').click()")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    assert page.run("document.querySelectorAll('.unanswered').length") == 0
    assert len(page.run(TURNS)) == 2


def test_a_new_chat_stays_new_when_the_page_is_left_at_once(page: Browser) -> None:
    for _ in range(3):
        ask(page, "Hi")
        page.run("document.getElementById('clear').click(), location.reload(), window.old = true")
        page.wait_for("!window.old && document.body?.dataset.ready === ''")
        assert page.run(TURNS) == []


def test_a_hostile_conversation_that_was_kept_stays_text(page: Browser) -> None:
    place = "messages[0].content[0]"
    trace = {
        "ms": {"first_token": 1, "total": 2, "prepared": 0.1, "admitted": 0.2},
        "prompt": {"cached_tokens": HACK},
        "images": [
            {
                "place": place, "found": found, "tier": found, "missed": {found: HACK},
                "format": HACK, "bytes": 1, "tokens": HACK, "digest": HACK,
                "size": {"width": HACK, "height": 1}, "resized": {"width": 1, "height": 1},
                "starts": {"fetch": 0}, "ms": {"fetch": 1, "digest": 1},
            }
            for found in (HACK, "constructor", "__proto__")
        ],
        "videos": [{"place": HACK, "summary": HACK, "note": HACK, "found": {"constructor": HACK}}],
    }  # fmt: skip
    image = {"name": HACK, "url": "javascript:window.hacked=1", "thumbnail": "javascript:hacked=1"}
    answer = {"role": "assistant", "text": HACK, "reasoning": HACK, "images": []}
    note = {"kind": "error", "words": HACK}
    turns = [
        {"role": "user", "text": HACK, "images": [image]},
        {**answer, "seen": [[0, 0]] * 3, "note": note, "trace": trace},
    ]
    page.run(f"import('/page/store.js').then(({{keep}}) => keep({TAB}, {json.dumps(turns)}))")
    reload(page)
    assert len(page.run(TURNS)) == 2
    page.run("document.querySelector('.trace').open = true")
    page.run("document.querySelector('.user .thumbnail').click()")
    page.wait_for("document.getElementById('status').textContent === 'ready'")
    found = page.run("[...document.querySelectorAll('.found')].map((each) => each.textContent)")
    assert found == [f"{HACK} constructor", HACK, "constructor", "__proto__"]
    assert page.run("window.hacked === undefined")
    assert page.run("document.querySelectorAll('[onerror], .turn img[src=x]').length") == 0
    page.run("document.getElementById('viewer').close()")


def test_a_conversation_that_another_version_kept_does_not_break_the_page(page: Browser) -> None:
    page.run(
        f"import('/page/store.js').then(({{keep}}) => keep({TAB}, "
        "[{text: 'x', images: []}, {text: 'y', images: [], seen: 5}]))"
    )
    reload(page)
    assert page.run(TURNS) == []
    assert ask(page, "Hi")


# ---- models


def test_one_of_several_models_is_chosen_and_a_hostile_name_stays_text(
    browser: Browser, tmp_path: Path
) -> None:
    names = ("one", HACK)
    options = [word for name in names for word in ("--served-model-name", name)]
    with serving("demo", tmp_path, "--max-total-tokens", "4096", *options) as it:
        browser.open(f"{it.url}/")
        browser.wait_for("!document.getElementById('models').hidden")
        assert browser.run("document.getElementById('model').hidden")
        offered = "[...document.getElementById('models').options].map(({text}) => text)"
        assert browser.run(offered) == list(names)
        browser.run("document.getElementById('models').selectedIndex = 1")
        browser.run(
            "window.sent = []; window.realFetch = window.fetch; window.fetch = (path, options) => {"
            "if (options.body) sent.push(JSON.parse(options.body).model);"
            "return realFetch(path, options) }"
        )
        assert ask(browser, "Hi")
        assert browser.run("sent") == [HACK]
        assert browser.run("window.hacked === undefined")
        browser.open("about:blank")


def test_an_adapter_is_chosen_and_the_choice_outlives_a_reload(page: Browser) -> None:
    listed = [{"id": "demo"}, {"id": "receipts", "parent": "demo"}, {"id": HACK, "parent": "demo"}]
    page.run(
        "window.realFetch ??= window.fetch; window.sent = [];window.fetch = (path, options) => "
        "{if (options?.body) sent.push(JSON.parse(options.body));return path === 'v1/models' ? "
        f"new Response({json.dumps(json.dumps({'data': listed}))}) : realFetch(path, options) }}"
    )
    page.wait_for("!document.getElementById('models').hidden")
    group = "document.querySelector('#models optgroup')"
    assert page.run(f"[...{group}.children].map(({{text}}) => text)") == ["receipts", HACK]
    page.run("models.value = 'receipts', models.dispatchEvent(new Event('change'))")
    assert page.run("JSON.parse(localStorage['saccade-settings']).models") == "receipts"
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    assert page.wait_for("window.sent[0]?.model") == "receipts"
    assert "receipts" in notice(page), "the real server has none of this name"


def test_the_answer_says_which_model_gave_it_and_how_fast(page: Browser) -> None:
    ask(page, "Hi")
    assert "tokens/s" in page.run("document.querySelector('.trace summary').textContent")
    assert page.run("document.querySelector('.trace .small').textContent").startswith(
        "answered by demo · "
    )


# ---- options


def test_what_is_set_is_sent_and_what_is_not_is_left_to_the_server(page: Browser) -> None:
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    page.run(FAKE % "() => { window.sent = options.body; throw new TypeError('no') }")
    for name, value in (("top-p", "0.5"), ("seed", "7"), ("schema", json.dumps(schema))):
        set_field(page, name, value)
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    sent = json.loads(page.wait_for("window.sent"))
    assert (sent["top_p"], sent["seed"], "temperature" in sent) == (0.5, 7, False)
    assert sent["response_format"]["json_schema"]["schema"] == schema
    page.run("window.fetch = realFetch")
    page.wait_for("document.getElementById('question').value === 'Hi'")
    page.run("document.getElementById('send').click()")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    assert set(json.loads(page.run(ANSWER))) == {"red"}, "the real server keeps to the schema"


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("schema", "{", "A JSON schema is a JSON object: "),
        ("schema", "[1]", "A JSON schema is a JSON object: "),
        ("top-p", "1.5", "A number from 0 to 1"),
        ("seed", "0.5", "A whole number"),
    ],
)
def test_an_option_that_no_server_takes_is_not_sent(
    page: Browser, name: str, value: str, words: str
) -> None:
    set_field(page, name, value)
    page.run("document.getElementById('question').value = 'Hi'")
    page.run("document.getElementById('send').click()")
    page.wait_for("!document.getElementById('options').hidden")
    assert page.run(f"document.getElementById('{name}-wrong').textContent").startswith(words)
    assert page.run("document.querySelectorAll('.turn').length") == 0


# ---- a server that dies


@contextmanager
def started_again(dead: Server) -> Iterator[None]:
    """The same command on the same port."""
    arguments = dead.process.args
    assert isinstance(arguments, list)
    with dead.log.open("ab") as out:
        process = subprocess.Popen(arguments, stdout=out, stderr=out)
    try:
        wait_until_ready(Server(dead.url, process, dead.log))
        yield
    finally:
        process.terminate()
        process.wait(30)


def test_a_killed_server_leaves_half_an_answer_and_gives_the_next_question_back(
    browser: Browser, tmp_path: Path
) -> None:
    with serving("demo", tmp_path, "--max-total-tokens", "16384", status=-9) as mortal:
        browser.open(f"{mortal.url}/")
        browser.wait_for("document.getElementById('status').textContent === 'ready'")
        begin_long(browser)
        mortal.process.kill()
        mortal.process.wait()
        browser.wait_for("document.querySelector('.assistant[data-done]')")
        error = browser.run("document.querySelector('.assistant .error').textContent")
        assert error == "Connection lost. The answer is incomplete. Try again"
        half = browser.run(ANSWER)
        assert len(half) > 10
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{mortal.url}/health")
        # Again, and another question: nobody is there, and nothing is lost.
        browser.run("document.querySelector('.assistant .error button').click()")
        assert "cannot be reached" in notice(browser)
        assert browser.run(ANSWER) == half
        browser.run("document.getElementById('question').value = 'Hi'")
        browser.run("document.getElementById('send').click()")
        browser.wait_for("document.getElementById('question').value === 'Hi'")
        browser.wait_for("document.getElementById('status').className === 'failed'")
        browser.run("window.fetch = realFetch")
        with started_again(mortal):
            browser.run("document.querySelector('#notice button').click()")
            browser.wait_for("document.querySelectorAll('.assistant[data-done]').length === 2")
            assert len(browser.run(TURNS)) == 4
            assert browser.run("document.getElementById('question').value") == ""
            browser.wait_for("document.getElementById('status').textContent === 'ready'")
            browser.open("about:blank")
