"""The page at / by keyboard alone, by touch, and for those who want nothing to move, in a headless
Chromium.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.demo.run import QUESTIONS
from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import DROP, ask, browser, give, keep, page, server
from tests.e2e.test_page_use import FAKE, answer_with, press

__all__ = ["browser", "page", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
MARKDOWN = """An image is cut into **patches** of `16 × 16` pixels, \
and four of them become one token:

```python
def tokens(width: int, height: int) -> int:
    return (width // 32) * (height // 32)
```

| image | tokens | seen again |
|---|---:|---:|
| 256 × 192 | 48 | a hash |
| 1,024 × 768 | 768 | a hash |

So of an image that was seen before:

1. nothing is *decoded*,
2. nothing is *encoded*,
3. and, after the same words, nothing is computed at all.
"""
FOCUSED = "(document.activeElement.id || document.activeElement.textContent.trim())"
RING = (
    "(() => { const style = getComputedStyle(%s); return style.outlineStyle + style.boxShadow })()"
)


@pytest.fixture
def phone(page: Browser) -> Iterator[Browser]:
    """The page on a device that has a finger for a pointer."""
    page.send("Emulation.setTouchEmulationEnabled", enabled=True)
    page.send(
        "Emulation.setDeviceMetricsOverride",
        width=390, height=844, deviceScaleFactor=2, mobile=True,
    )  # fmt: skip
    page.run("document.activeElement.blur()")
    page.wait_for("document.getElementById('live').hidden && innerWidth === 390")
    yield page
    page.send("Emulation.setTouchEmulationEnabled", enabled=False)
    page.send("Emulation.clearDeviceMetricsOverride")


def tab(page: Browser, *, back: bool = False) -> str:
    """Press Tab; the element that has the focus then, which must be seen to have it."""
    for kind in ("rawKeyDown", "keyUp"):
        page.send(
            "Input.dispatchKeyEvent",
            type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9, modifiers=8 if back else 0,
        )  # fmt: skip
    name: str = page.run(FOCUSED)
    if page.run("document.activeElement !== document.body"):
        marked = "document.activeElement.closest('#box') ?? document.activeElement"
        rings = [page.run(RING % of) for of in ("document.activeElement", marked)]
        assert set(rings) != {"nonenone"}, f"{name} has the focus, and nothing shows it"
    return name


def write(page: Browser, text: str) -> None:
    page.send("Input.insertText", text=text)


def tap(page: Browser, what: str) -> None:
    """Tap the middle of an element."""
    page.run(f"{what}.scrollIntoView({{block: 'nearest'}})")
    x, y = page.run(
        f"(() => {{ const box = {what}.getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2] })()"
    )
    page.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    page.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])


def test_everything_is_reached_by_tab_in_the_order_in_which_it_stands(page: Browser) -> None:
    page.wait_for("document.getElementById('watch').checkVisibility()")
    page.run("document.getElementById('question').focus()")
    assert [tab(page) for _ in range(5)] == ["add", "watch", "more", "send", "live"]
    page.run("document.querySelector('header a').focus()")
    assert [tab(page) for _ in range(3)] == ["figures", "clear", "search"]
    page.run("document.getElementById('import').focus()")
    assert [tab(page) for _ in range(2)] == ["try", "question"]
    assert tab(page, back=True) == "try"


def test_a_question_is_asked_edited_and_forgotten_by_keyboard_alone(page: Browser) -> None:
    page.run("document.getElementById('question').focus()")
    write(page, "One")
    press(page, "Enter", shift=True)
    write(page, "two")
    assert page.run("document.getElementById('question').value") == "One\ntwo"
    assert page.run("document.querySelectorAll('.turn').length") == 0
    press(page, "Enter")
    page.wait_for("document.querySelector('.assistant[data-done]')")
    assert page.run("document.querySelector('.user .text').textContent") == "One\ntwo"
    assert page.run(FOCUSED) == "question", "the next question can be written at once"
    # Back through the answer's tools to the question's.
    walk = [tab(page, back=True) for _ in range(4)]
    assert walk[:2] == ["Regenerate", "Copy"] and walk[3] == "Edit", walk
    press(page, "Enter")
    assert page.run(FOCUSED) == "question" and not page.run(
        "document.getElementById('editing').hidden"
    )
    press(page, "Escape")
    assert page.run("document.getElementById('editing').hidden")
    assert page.run("document.getElementById('question').value") == ""
    # The options, opened and filled, and closed with Escape.
    assert [tab(page) for _ in range(3)] == ["add", "watch", "more"]
    press(page, "Enter")
    assert not page.run("document.getElementById('options').hidden")
    assert [tab(page, back=True) for _ in range(2)] == ["watch", "add"]
    fields = ["schema", "detail", "pace", "seed", "max-tokens", "top-p", "temperature", "system"]
    assert [tab(page, back=True) for _ in fields] == fields
    press(page, "Escape")
    assert page.run("document.getElementById('options').hidden")
    page.run("document.getElementById('figures').focus()")
    assert tab(page) == "clear"
    press(page, "Enter")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.run(FOCUSED) == "question"


def test_a_finger_asks_without_the_keyboard_in_its_way(phone: Browser) -> None:
    assert phone.run("matchMedia('(pointer: coarse) and (hover: none)').matches")
    tap(phone, "document.getElementById('try')")
    phone.wait_for("document.querySelector('.assistant[data-done]')")
    assert phone.run(FOCUSED) != "question", "the keyboard would cover the answer"
    tap(phone, "document.querySelector('.user .thumbnail')")
    phone.wait_for("document.getElementById('viewer').open")
    tap(phone, "document.getElementById('viewer-image')")
    phone.wait_for("!document.getElementById('viewer').open")
    tap(phone, "document.querySelector('.trace summary')")
    phone.wait_for("document.querySelector('.trace').open")
    small = phone.run(
        "[...document.querySelectorAll('button, summary, select, a')].filter((each) => "
        "each.checkVisibility()).map((each) => [each.textContent, each.getBoundingClientRect()])"
        ".filter(([, box]) => box.height < 24 || box.width < 24).map(([words]) => words)"
    )
    assert small == []
    assert phone.run("document.documentElement.scrollWidth") == 390
    bottom = "document.getElementById('ask').getBoundingClientRect().bottom"
    assert phone.run(bottom) == phone.run("innerHeight"), "the form is at the bottom"
    tap(phone, "document.getElementById('figures')")
    phone.wait_for("!document.getElementById('live').hidden")
    press(phone, "Escape")
    phone.wait_for("document.getElementById('live').hidden")


def test_nothing_moves_where_nothing_is_to_move(page: Browser) -> None:
    page.run(FAKE % "() => new Promise((_, no) => options.signal.addEventListener('abort', "
                    "() => no(new DOMException('', 'AbortError'))))")  # fmt: skip
    moving = "document.getAnimations().length"
    found = {}
    for wish in ("no-preference", "reduce"):
        wishes = [{"name": "prefers-reduced-motion", "value": wish}]
        page.send("Emulation.setEmulatedMedia", features=wishes)
        page.run(f"document.getElementById('question').value = {json.dumps(wish)}")
        page.run("document.getElementById('send').click()")
        page.wait_for("document.querySelector('.waits')?.textContent")
        found[wish] = page.run(moving)
        press(page, "Escape")
        page.wait_for("document.getElementById('stop').hidden")
    page.send("Emulation.setEmulatedMedia", features=[])
    assert found == {"no-preference": 1, "reduce": 0}


def test_a_phone_shows_a_chat_in_its_width(phone: Browser, tmp_path: Path) -> None:
    for turn in QUESTIONS[:2]:
        give(phone, DROP, turn.images)
        assert ask(phone, turn.question) == turn.answer
    assert phone.run("document.documentElement.scrollWidth") == 390
    keep(phone, "page-phone.png", tmp_path)


def test_in_the_dark_words_are_lighter_than_their_ground(page: Browser, tmp_path: Path) -> None:
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    page.send("Emulation.setEmulatedMedia", features=[dark])
    answer_with(page, MARKDOWN)
    ask(page, "How is an image read, and what does it cost the second time?")
    light = "getComputedStyle(document.body).%s.match(/[0-9.]+/g).slice(0, 3).map(Number)"
    words, ground = (sum(page.run(light % name)) for name in ("color", "backgroundColor"))
    assert words > 3 * ground
    keep(page, "page-dark.png", tmp_path)
    page.send("Emulation.setEmulatedMedia", features=[])
