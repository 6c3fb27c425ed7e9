"""Formulas in answers on the page at /, in a headless Chromium.

With PAGE_SCREENSHOTS=FOLDER, what was seen is kept there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import ask, browser, keep, page, server
from tests.e2e.test_page_use import answer_with

__all__ = ["browser", "page", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
FETCHED = "performance.getEntriesByType('resource').some(({name}) => name.endsWith('temml.mjs'))"
FORMULAS = (
    "[...document.querySelectorAll('.assistant:last-child math')].map((each) => each.textContent)"
)
TEXT = "document.querySelector('.assistant:last-child .text').textContent.trim()"
ANSWER = r"""The solutions of $ax^2+bx+c=0$ are
\[
x
=
\frac{-b \pm \sqrt{b^2-4ac}}{2a}
\]
with \(a \ne 0\), and the mean of the grey values is

$$\bar g = \frac{1}{n}\sum_{i=1}^{n} g_i, \qquad M = \begin{pmatrix} a & b \\ c & d \end{pmatrix}$$

- In a list, too: $\hat{y} = \operatorname{softmax}(Wx)$.
"""
DOLLARS = (
    "It costs $5 and $10.",
    "A \\$5 note",
    "`$x$` and `\\(y\\)`",
    "$ 5 $",
    "$10, `$x$`",
    "a$$b",
)
"""What is no formula."""
HOSTILE = (
    r"$\href{javascript:window.hacked=1}{x}$",
    r"$\includegraphics{https://example.org/x.png}$",
    r"$\htmlData{x=1}{y}$ $\class{away}{z}$ $\id{ask}{w}$",
    r"$\style{background:url(//example.org)}{v}$",
    r"$\text{<img src=x onerror=window.hacked=1>}$",
    r"$\color{red;background:url(//example.org)}{x}$",
    r"$\def\a{\a\a}\a$",
    r"$\rule{99999em}{99999em}$",
)


def test_formulas_are_drawn_and_their_library_is_fetched_for_them_alone(
    page: Browser, tmp_path: Path
) -> None:
    answer_with(page, "No formula for $5.")
    ask(page, "Hi")
    assert not page.run(FETCHED)
    answer_with(page, ANSWER)
    ask(page, "How are they computed?")
    page.wait_for(f"{FORMULAS}.length === 5")
    assert page.run(FETCHED)
    assert page.run("document.querySelectorAll('.formula.display').length") == 2
    assert page.run("document.querySelectorAll('.assistant:last-child h1').length") == 0
    assert page.run(f"{FORMULAS}[1]") == "x=−b±b2−4ac2a"
    low, high = page.run(
        "[...document.querySelectorAll('.formula.display mfrac > *')].slice(0, 2)"
        ".map((each) => each.getBoundingClientRect().bottom)"
    )
    assert low < high, "a fraction's parts stand above each other"
    keep(page, "page-math.png", tmp_path)
    assert not page.complaints


@pytest.mark.parametrize("text", DOLLARS)
def test_what_is_no_formula_stays_as_it_is(page: Browser, text: str) -> None:
    answer_with(page, f"{text}\n\nBut $x$ is.")
    ask(page, "Hi")
    page.wait_for(f"{FORMULAS}.length === 1")
    shown = page.run("document.querySelector('.assistant .text p').textContent")
    assert shown == text.replace("`", "").replace("\\$", "$")


def test_what_the_library_cannot_read_stays_as_it_was_written(page: Browser) -> None:
    answer_with(page, r"$\frac{1}{$, $\nosuch{x}$, $x$")
    ask(page, "Hi")
    page.wait_for(f"{FORMULAS}.length === 1")
    assert page.run(TEXT) == r"$\frac{1}{$, $\nosuch{x}$, x"


def test_code_stays_code(page: Browser) -> None:
    answer_with(page, "$x$\n\n```latex\n$$E=mc^2$$\n\\[a\\]\n```\n")
    ask(page, "Hi")
    page.wait_for(f"{FORMULAS}.length === 1")
    code = "[...document.querySelectorAll('.assistant pre')].map((each) => each.textContent.trim())"
    assert page.run(code) == ["$$E=mc^2$$\n\\[a\\]"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_formula_does_nothing(page: Browser, text: str) -> None:
    answer_with(page, f"{text} $x$")
    ask(page, "Hi")
    page.wait_for(f"{FORMULAS}.length > 0")
    bad = (
        "[...document.querySelectorAll('.assistant .text *')].filter((each) => each.id "
        "|| ['a', 'img', 'iframe', 'script'].includes(each.localName) "
        "|| [...each.attributes].some(({name}) => /^(on|href|src|data)/.test(name))"
        "|| each.style.background || each.getBoundingClientRect().width > 5000)"
        ".map((each) => each.outerHTML)"
    )
    assert page.run(bad) == []
    assert page.run("window.hacked === undefined") and not page.complaints
    assert "example.org" not in json.dumps(
        page.run("performance.getEntriesByType('resource').map(({name}) => name)")
    )
