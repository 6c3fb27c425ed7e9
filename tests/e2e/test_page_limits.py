"""Texts and conversations that would stop the page at /, in a headless Chromium: work is bounded,
and what is beyond a bound is shown as it was written.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import ask, browser, page, server
from tests.e2e.test_page_answers import TURNS
from tests.e2e.test_page_chats import nothing_kept, take
from tests.e2e.test_page_use import FAKE, answer_with

__all__ = ["browser", "nothing_kept", "page", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
MAX_ELEMENTS = 20_000
PLAIN = {
    "quotes": "> " * 5000 + "x",
    "lists": "- " * 5000 + "x",
    "numbered lists": "1. " * 5000 + "x",
    "quoted lists": "> - " * 2500 + "x",
    "indented lists": "\n".join("  " * depth + "- x" for depth in range(300)),
    "emphasis": "*a **b " * 700 + "b** a*" * 700,
    "underscores": "a_" * 10_000,
    "stars": "a*" * 20_000,
    "brackets": "[" * 20_000,
    "images": "![" * 20_000,
    "angles": "<" * 40_000,
    "formulas without an end": "\\[a\n" * 20_000,
    "formulas in a row": "$$a\n" * 20_000,
    "lines": "a\n" * 20_000,
    "items": "a\n- \n" * 20_000,
    "a table": "|a|b|\n|-|-|\n" + "|a|b|\n" * 40_000,
    "a wide table": "|a" * 20_000 + "|\n" + "|-" * 20_000 + "|\n" + "|a" * 20_000 + "|",
    "characters": "word " * 50_000,
}
"""Texts that cost more than their budget."""
RENDERED = {
    "dollars": ("$" * 20_000, "p"),
    "a long table": ("|a|b|\n|-|-|\n" + "|a|b|\n" * 2000, "table"),
    "long code": ("```\n" + "x = 1\n" * 20_000 + "```", ".code"),
    "paragraphs": ("Some *words* of a `text`, and $x$.\n\n" * 1000, "em"),
    "a nested list": ("\n".join("  " * depth + "- x" for depth in range(8)), "ul ul ul ul ul ul"),
}
"""Long texts that do not."""
LAST = "document.querySelector('.assistant:last-child %s')"


def assert_done(page: Browser) -> None:
    """The last bubble has ended, and the next question works."""
    state = page.run(
        f"(({{classList, ariaBusy, lastChild}}) => "
        f"[classList.contains('running'), ariaBusy, lastChild.localName])({LAST % ''})"
    )
    assert state == [False, None, "footer"]
    answer_with(page, "A sound answer.")
    assert ask(page, "And now?") == "A sound answer."
    assert not page.complaints


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_a_text_beyond_its_budget_is_shown_as_it_was_written(page: Browser, text: str) -> None:
    answer_with(page, text)
    ask(page, "Hi")
    assert page.run(LAST % ".plain" + ".textContent") == text
    assert_done(page)


@pytest.mark.parametrize(("text", "selector"), RENDERED.values(), ids=RENDERED)
def test_a_long_text_within_its_budget_is_rendered(page: Browser, text: str, selector: str) -> None:
    answer_with(page, text)
    ask(page, "Hi")
    assert not page.run("!!" + LAST % ".plain")
    assert page.run("!!" + LAST % f".text {selector}")
    assert page.run(LAST % ".text" + ".querySelectorAll('*').length") < MAX_ELEMENTS
    assert_done(page)


def test_dollars_that_open_no_formula_are_read_once(page: Browser) -> None:
    spent = page.run(
        "import('/page/markdown.js').then(({Budget, rendered}) => { const budget = new Budget();"
        "const before = {...budget}; rendered('$'.repeat(20000), budget);"
        "return [before.tokens - budget.tokens, before.scanned - budget.scanned] })"
    )
    assert spent == [3, 40_000], "a paragraph, its text, and the run of dollars"


@pytest.mark.parametrize("error", ["TypeError", "RangeError", "Error"])
def test_whatever_the_parser_throws_the_text_is_shown(page: Browser, error: str) -> None:
    page.run(
        "import('/page/vendor/marked.esm.js').then(({Parser}) => { window.parse = Parser.parse;"
        f"Parser.parse = () => {{ throw new {error}('broken') }} }})"
    )
    answer_with(page, "**Bold**")
    assert ask(page, "Hi") == "**Bold**"
    page.run("import('/page/vendor/marked.esm.js').then(({Parser}) => { Parser.parse = parse })")
    assert_done(page)


def test_four_blanks_begin_no_code(page: Browser) -> None:
    answer_with(page, "    \n    The answer\n\n    is *four*.")
    assert ask(page, "2 + 2?").split() == ["The", "answer", "is", "four."]
    assert page.run("document.querySelectorAll('.assistant pre').length") == 0
    assert page.run("document.querySelectorAll('.assistant em').length") == 1


# ---- conversations

SHOWN = "document.querySelectorAll('#talk article').length"
EARLIER = "document.querySelector('#talk .earlier')"


def conversation(answers: list[str]) -> str:
    messages: list[dict[str, Any]] = []
    for i, answer in enumerate(answers):
        messages += ({"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": answer})
    return json.dumps({"title": "Long", "messages": messages})


def test_of_a_long_conversation_the_end_is_shown_and_more_where_it_is_asked_for(
    page: Browser,
) -> None:
    take(page, "long.json", conversation([f"**A{i}**" for i in range(3000)]))
    page.wait_for(f"{SHOWN} === 60")
    assert page.run(TURNS)[-2:] == ["Q2999", "A2999"]
    assert page.run(f"{EARLIER}.textContent") == "Show earlier messages (5,940)"
    top = "document.querySelector('#talk article:nth-last-child(60)').getBoundingClientRect().top"
    page.run("document.getElementById('scroll').scrollTop = 0")
    before = page.run(top)
    page.run(f"{EARLIER}.click()")
    assert page.run(SHOWN) == 120 and page.run(TURNS)[0] == "Q2940"
    assert abs(page.run(top) - before) < 60, "what was read stays, but for the button's height"
    assert page.run(f"{EARLIER}.textContent") == "Show earlier messages (5,880)"
    # The buttons of a turn are still about that turn, and all turns are sent.
    page.run(
        "window.realFetch ??= window.fetch; window.fetch = async (path, options) => {"
        "if (!String(path).includes('chat/completions')) return realFetch(path, options);"
        "window.sent = JSON.parse(options.body).messages; return new Response('data: ' +"
        "JSON.stringify({choices: [{delta: {content: 'New'}}]}) + '\\n\\ndata: [DONE]\\n\\n') }"
    )
    page.run("document.querySelectorAll('#talk .user .tools button')[0].click()")
    assert page.run("document.getElementById('question').value") == "Q2940"
    ask_again = "document.getElementById('send').click()"
    page.run(ask_again)
    page.wait_for("window.sent")
    assert page.run("sent.length") == 2 * 2940 + 1
    page.wait_for(f"{TURNS}.at(-1) === 'New'")
    assert not page.complaints


def test_a_short_conversation_is_shown_whole(page: Browser) -> None:
    take(page, "short.json", conversation(["A"] * 30))
    page.wait_for(f"{SHOWN} === 60")
    assert not page.run(f"!!{EARLIER}")


def test_the_answers_of_a_conversation_share_a_budget(page: Browser) -> None:
    """The last ones are rendered, those before them are shown as they were written."""
    take(page, "costly.json", conversation(["a_" * 5000] * 30))
    page.wait_for(f"{SHOWN} === 60")
    plain = page.run(
        "[...document.querySelectorAll('.assistant .text')]"
        ".map((each) => !!each.querySelector('.plain'))"
    )
    rendered = plain.count(False)
    assert 0 < rendered < 10 and plain == sorted(plain, reverse=True)


# ---- where an answer is cut off


def test_the_page_names_no_limit_and_says_after_how_many_tokens_it_was_cut(page: Browser) -> None:
    chunks = [
        {"choices": [{"delta": {"content": "Hello"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 1256}},
    ]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
    page.run(FAKE % f"() => new Response({json.dumps(body)})")
    page.run(
        "(() => { const fake = window.fetch; window.fetch = (path, options) => {"
        "if (options?.body) window.sent = JSON.parse(options.body);"
        "return fake(path, options) } })()"
    )
    ask(page, "Hi")
    words = "Stopped at the limit of 1,256 tokens. You can change it in Options."
    assert page.run("document.querySelector('.assistant .small').textContent") == words
    assert "max_tokens" not in page.run("Object.keys(sent)")
