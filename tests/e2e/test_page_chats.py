"""The list of conversations on the page at /, in a headless Chromium: kept, found, renamed,
deleted, exported and imported; and what is said when the browser has no room.

With PAGE_SCREENSHOTS=FOLDER, what was seen is kept there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade.demo.run import QUESTIONS
from tests.e2e.chromium import CHROMIUM, Browser
from tests.e2e.test_page import DROP, ask, browser, give, keep, page, server
from tests.e2e.test_page_answers import HACK, NEVER, TURNS, begin_long
from tests.e2e.test_page_hands import FOCUSED, phone, tap
from tests.e2e.test_page_use import FAKE, answer_with, notice, press, reload

__all__ = ["browser", "page", "phone", "server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
TITLES = "[...document.querySelectorAll('#chat-list .chat')].map((each) => each.textContent)"
CURRENT = "document.querySelector('#chat-list [aria-current]')?.textContent"
SAVED = """(() => {
  window.saved = [];
  const real = URL.createObjectURL;
  URL.createObjectURL = (blob) => (saved.push(blob), real(blob));
})()"""
"""What the page gives to be downloaded is noted."""


@pytest.fixture(autouse=True)
def nothing_kept(page: Browser) -> Iterator[None]:
    """The list is empty before and after."""
    forget = (
        "import('/page/store.js').then(async ({heads, forget}) => {"
        "for (const {id} of await heads()) await forget(id) })"
    )
    page.run(forget)
    reload(page)
    page.wait_for(f"{TITLES}.length === 0")
    yield
    page.run(forget)


def menu(page: Browser, title: str, words: str) -> None:
    """Press what the menu of a conversation offers."""
    item = (
        "[...document.querySelectorAll('#chat-list li')]"
        f".find((each) => each.querySelector('.chat')?.textContent === {json.dumps(title)})"
    )
    page.wait_for(item)
    if not page.run("document.getElementById('chat-menu').matches(':popover-open')"):
        page.run(f"{item}.querySelector('.more').click()")
    page.run(
        "[...document.querySelectorAll('#chat-menu:popover-open button')]"
        f".find((each) => each.textContent === {json.dumps(words)}).click()"
    )


def new_chat(page: Browser) -> None:
    page.run("document.getElementById('clear').click()")


def type_into(page: Browser, id: str, text: str) -> None:
    page.run(
        f"(() => {{ const field = document.getElementById({json.dumps(id)});"
        f"field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input')) }})()"
    )


def take(page: Browser, name: str, text: str) -> None:
    """Import a file."""
    page.run(
        "(() => { const transfer = new DataTransfer(); transfer.items.add("
        f"new File([{json.dumps(text)}], {json.dumps(name)}, {{type: 'application/json'}}));"
        "const field = document.getElementById('import-file'); field.files = transfer.files;"
        "field.dispatchEvent(new Event('change')) })()"
    )


def saved(page: Browser) -> str:
    """The last file that was downloaded."""
    page.wait_for("window.saved.length")
    return str(page.run("saved.pop().text()"))


def test_conversations_are_listed_opened_searched_renamed_and_deleted(
    page: Browser, tmp_path: Path
) -> None:
    first = QUESTIONS[0]
    give(page, DROP, first.images)
    ask(page, first.question)
    new_chat(page)
    answer_with(page, "Two patches of sixteen pixels.")
    ask(page, "How large is a patch?")
    page.wait_for(f"{TITLES}.length === 2")
    assert page.run(TITLES) == ["How large is a patch?", first.question], "the newest first"
    assert page.run(CURRENT) == "How large is a patch?"
    page.run("document.querySelectorAll('#chat-list .chat')[1].click()")
    page.wait_for(f"{TURNS}[0] === {json.dumps(first.question)}")
    assert page.run("document.querySelectorAll('.trace .thumbnail img').length") == 1
    assert page.run(CURRENT) == first.question
    reload(page)
    assert page.run(TURNS)[0] == first.question, "this tab's, over a reload"
    keep(page, "page-chats.png", tmp_path)
    # Words of answers are found, too.
    type_into(page, "search", "SIXTEEN patches")
    assert page.run(TITLES) == ["How large is a patch?"]
    type_into(page, "search", "elephant")
    assert page.run(TITLES) == [] and not page.run("document.getElementById('none-found').hidden")
    type_into(page, "search", "")
    menu(page, first.question, "Rename")
    page.run("document.querySelector('#chat-list input').value = 'A number'")
    press(page, "Enter")
    page.wait_for(f"{TITLES}.includes('A number')")
    ask(page, "And now?")
    page.wait_for(f"{TITLES}[0] === 'A number'"), "the user's name stays"
    menu(page, "A number", "Delete")
    assert len(page.run(TITLES)) == 2, "the first press asks"
    menu(page, "A number", "Confirm delete")
    page.wait_for(f"{TITLES}.length === 1")
    assert page.run(TURNS) == []
    reload(page)
    page.wait_for(f"{TITLES}.length === 1")
    assert not page.complaints


def test_what_was_deleted_is_gone_when_the_page_is_left_at_once(page: Browser) -> None:
    ask(page, "Hi")
    menu(page, "Hi", "Delete")
    page.run("window.old = true")
    menu(page, "Hi", "Confirm delete")
    page.run("location.reload()")
    page.wait_for("!window.old && document.body?.dataset.ready === ''")
    page.wait_for("import('/page/store.js').then(({heads}) => heads()).then((all) => !all.length)")
    assert page.run(TURNS) == []


def test_another_conversation_is_opened_in_mid_answer_and_nothing_is_lost(page: Browser) -> None:
    answer_with(page, "Hello")
    ask(page, "First")
    new_chat(page)
    page.run("window.fetch = realFetch")
    begin_long(page)
    page.run("[...document.querySelectorAll('#chat-list .chat')].at(-1).click()")
    page.wait_for(f"{TURNS}[0] === 'First'")
    assert page.run("document.getElementById('stop').hidden")
    page.run("document.querySelector('#chat-list .chat').click()")
    page.wait_for(f"{TURNS}[0] === 'Hi'")
    assert len(page.run(TURNS)[1]) > 10, "what had been said"
    assert page.run("document.querySelector('.assistant .small').textContent") == "Stopped."
    new_chat(page)
    page.run(FAKE % NEVER)
    page.run("document.getElementById('question').value = 'Never answered'")
    page.run("document.getElementById('send').click()")
    page.wait_for("document.querySelector('.waits')?.textContent")
    new_chat(page)
    page.wait_for(f"{TURNS}.length === 0 && {TITLES}.includes('Never answered')")


def test_a_conversation_is_exported_and_imported_with_its_images(page: Browser) -> None:
    page.run(SAVED)
    first = QUESTIONS[0]
    give(page, DROP, first.images)
    answer = ask(page, first.question)
    menu(page, first.question, "Export as Markdown")
    assert saved(page) == (
        f"# {first.question}\n\n## Question\n\n*File: 0.png*\n\n{first.question}\n\n"
        f"## Answer\n\n{answer}\n"
    )
    menu(page, first.question, "Export as JSON")
    text = saved(page)
    file: dict[str, Any] = json.loads(text)
    (image, words), said = (message["content"] for message in file["messages"])
    assert words == {"type": "text", "text": first.question} and said.strip() == answer
    assert base64.b64decode(image["image_url"]["url"].split(",")[1]).startswith(b"\x89PNG")
    menu(page, first.question, "Delete")
    menu(page, first.question, "Confirm delete")
    page.wait_for(f"{TITLES}.length === 0")
    take(page, "saved.json", text)
    page.wait_for(f"{TURNS}.length === 2")
    assert page.run(TURNS) == [first.question, answer]
    assert page.run("document.querySelectorAll('.user .thumbnail img').length") == 1
    page.wait_for(f"{CURRENT} === {json.dumps(first.question)}")
    ask(page, "And now?")
    summary = "document.querySelector('#talk .turn:last-child .trace summary').textContent"
    assert page.run(summary).startswith("1 cached image; "), "the same bytes"


def values(*each: Any) -> tuple[Any, ...]:
    """Values of types that no conversation has."""
    return each


NO_LIST = 'it has no list of "messages".'
NO_ROLE = 'its message 2 needs a role of "user", "assistant" or "system".'
NO_TEXT = "its message 2 has neither a text nor a list of parts."
NO_PART = "its message 2 has a part of an unsupported type."
NO_DATA = "its message 2 has a file that is not a base64 data: URL."
NO_FRAMES = "its message 2 has a video without frames."
NOT_JSON = ("no JSON", "", "{", "{'messages': []}")
WITHOUT_MESSAGES: tuple[Any, ...] = (
    *({}, None, [], 5, "text", True, [{"role": "user", "content": "x"}]),
    *({"messages": each} for each in values(None, {}, 5, "text", {"length": 1})),
)
BAD_MESSAGES: tuple[tuple[Any, str], ...] = (
    *((each, "its message 2 is not an object.") for each in values(None, 5, "text", [])),
    *(({"role": each, "content": "x"}, NO_ROLE) for each in values("tool", None, 5, ["user"], {})),
    ({}, NO_ROLE),
    *(
        ({"role": "assistant", "content": each}, NO_TEXT)
        for each in values(None, 5, {}, [None], ["x"])
    ),
    ({"role": "user"}, NO_TEXT),
    *(
        (
            {"role": "user", "content": [{"type": "text", "text": each}]},
            "its message 2 has a text part without a text.",
        )
        for each in values(None, 5, {"toString": 1})
    ),
    *(
        ({"role": "user", "content": [{"type": each}]}, NO_PART)
        for each in values(None, "audio", {})
    ),
    *(
        ({"role": "user", "content": [{"type": "image_url", "image_url": each}]}, NO_DATA)
        for each in (
            *(None, "data:image/png;base64,aaaa", {"url": {"toString": 1}}),
            *({"url": "http://127.0.0.1:1/secret"}, {"url": "data:text/html;base64,aaaa"}),
            *({"url": "data:image/png;base64,a"}, {"url": "data:image/png;base64,a=aa"}),
        )
    ),
    ({"role": "user", "content": [{"type": "file", "file": {"filename": {}}}]}, NO_DATA),
    *(
        ({"role": "user", "content": [{"type": "video", **each}]}, NO_FRAMES)
        for each in (
            {},
            {"video": 5, "fps": 1, "max_pixels": 1},
            {"video": ["data:image/png;base64,aaaa"], "fps": "x", "max_pixels": 1},
        )
    ),
)


def refusal(page: Browser, text: str) -> str:
    """What the page says of a file; the conversation that is shown stays."""
    take(page, "other.json", text)
    words = notice(page)
    assert len(page.run(TURNS)) == 2
    page.run("document.getElementById('notice').hidden = true")
    return words.removeprefix("other.json was not imported: ")


def test_a_file_that_is_no_conversation_is_refused_in_plain_words(page: Browser) -> None:
    ask(page, "Hi")
    assert {refusal(page, each) for each in NOT_JSON} == {"the file is not JSON."}
    for each in WITHOUT_MESSAGES:
        assert refusal(page, json.dumps(each)) == NO_LIST, each
    system = {"role": "system", "content": "x"}
    for messages in ([], [system]):
        assert refusal(page, json.dumps({"messages": messages})) == "the file has no messages."
    for message, words in BAD_MESSAGES:
        assert refusal(page, json.dumps({"messages": [system, message]})) == words, message
    assert not page.complaints


THOUGHTS = "[...document.querySelectorAll('.thoughts')].map((each) => each.lastChild.textContent)"


@pytest.mark.parametrize(
    ("content", "thoughts", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nFour.", ["Hm."], "Four."),
        ("Hm.</think>Four.", ["Hm."], "Four."),  # the prompt had the opening tag
        ("<think>Hm.", ["Hm."], ""),
        ("<think></think>Four.", [], "Four."),
        ("Write <think> and </think>.", [], "Write <think> and </think>."),
        ("Four.", [], "Four."),
    ],
)
def test_reasoning_of_an_imported_answer_is_folded(
    page: Browser, content: str, thoughts: list[str], answer: str
) -> None:
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": content}]
    take(page, "other.json", json.dumps({"title": "T", "messages": said}))
    page.wait_for(f"{TURNS}.length === 2")
    assert page.run(THOUGHTS) == thoughts
    assert page.run(TURNS)[1] == answer


def test_an_imported_answer_may_name_its_reasoning_in_a_field(page: Browser) -> None:
    said = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."},
    ]
    take(page, "other.json", json.dumps({"messages": said}))
    page.wait_for(f"{TURNS}.length === 2")
    assert page.run(THOUGHTS) == ["Hm."] and page.run(TURNS)[1] == "Four."
    page.wait_for(f"{TITLES}[0] === 'other.json'")


def test_the_menu_of_a_conversation_moves_nothing(page: Browser) -> None:
    answer_with(page, "Hello")
    ask(page, "One")
    new_chat(page)
    ask(page, "Two")
    page.wait_for(f"{TITLES}.length === 2")
    places = (
        "[...document.querySelectorAll('#chat-list li')].map((each) => "
        "each.getBoundingClientRect().top)"
    )
    before = page.run(places)
    page.run("document.querySelector('#chat-list .more').click()")
    menu_open = "document.getElementById('chat-menu').matches(':popover-open')"
    assert page.run(menu_open) and page.run(places) == before
    left, top, right, bottom = page.run(
        "(({left, top, right, bottom}) => [left, top, right, bottom])"
        "(document.getElementById('chat-menu').getBoundingClientRect())"
    )
    assert left >= 0 and top >= 0 and right <= 1280 and bottom <= 800
    # Escape closes it, and stops no answer.
    page.run(FAKE % NEVER)
    page.run("document.getElementById('question').value = 'Three'")
    page.run("document.getElementById('send').click()")
    page.wait_for("!document.getElementById('stop').hidden")
    if not page.run(menu_open):
        page.run("document.querySelector('#chat-list .more').click()")
    press(page, "Escape")
    page.wait_for(f"!{menu_open}")
    assert not page.run("document.getElementById('stop').hidden")
    press(page, "Escape")
    page.wait_for("document.getElementById('stop').hidden")


def test_a_hostile_file_stays_text(page: Browser) -> None:
    said = [{"role": role, "content": HACK} for role in ("user", "assistant")]
    take(page, "hostile.json", json.dumps({"title": HACK, "messages": said}))
    page.wait_for(f"{TITLES}.length === 1")
    assert page.run(TITLES) == [HACK]
    menu(page, HACK, "Rename")
    assert page.run("document.querySelector('#chat-list input').value") == HACK
    press(page, "Escape")
    assert page.run("window.hacked === undefined")
    assert page.run("document.querySelectorAll('#chats img, .turn img').length") == 0


def test_a_full_browser_is_told_and_the_page_goes_on(page: Browser) -> None:
    page.run(SAVED)
    answer_with(page, "Hello")
    page.run(
        "window.realPut = IDBObjectStore.prototype.put; IDBObjectStore.prototype.put = () => {"
        "throw new DOMException('', 'QuotaExceededError') }"
    )
    ask(page, "One")
    assert "The browser's storage is full" in notice(page)
    page.wait_for(f"JSON.stringify({TITLES}) === '[\"One (not saved)\"]'")
    ask(page, "Two")
    assert page.run(TURNS) == ["One", "Hello", "Two", "Hello"]
    menu(page, "One (not saved)", "Export as JSON")
    assert len(json.loads(saved(page))["messages"]) == 4, "it can be saved all the same"
    # It outlives another, as long as the tab does, and is kept once there is room.
    new_chat(page)
    ask(page, "Other")
    page.wait_for(f"{TITLES}.length === 2")
    assert set(page.run(TITLES)) == {"One (not saved)", "Other (not saved)"}
    menu(page, "One (not saved)", "Export as JSON")
    assert len(json.loads(saved(page))["messages"]) == 4
    page.run("IDBObjectStore.prototype.put = realPut")
    menu(page, "Other (not saved)", "Delete")
    menu(page, "Other (not saved)", "Confirm delete")
    page.wait_for(f"JSON.stringify({TITLES}) === '[\"One\"]'")
    page.wait_for("document.getElementById('notice').hidden")
    reload(page)
    page.wait_for(f"JSON.stringify({TITLES}) === '[\"One\"]'")


def test_what_an_earlier_version_kept_is_listed(page: Browser) -> None:
    page.run("""new Promise((resolve) => {
      const gone = indexedDB.deleteDatabase("saccade");
      gone.onsuccess = () => {
        const old = indexedDB.open("saccade", 1);
        old.onupgradeneeded = () => {
          const chats = old.result.createObjectStore("chats", {keyPath: "id"});
          chats.createIndex("at", "at");
          chats.put({id: "old", at: 5, turns: [{role: "user", text: "Old words", images: []}]});
        };
        old.onsuccess = () => { old.result.close(); resolve() };
      };
    })""")
    reload(page)
    page.wait_for(f"JSON.stringify({TITLES}) === '[\"Old words\"]'")
    page.run("document.querySelector('#chat-list .chat').click()")
    page.wait_for(f"JSON.stringify({TURNS}) === '[\"Old words\"]'")


def test_the_list_covers_a_phone_until_one_is_chosen(phone: Browser, tmp_path: Path) -> None:
    answer_with(phone, "Hello")
    ask(phone, "Hi")
    tap(phone, "document.getElementById('chats-button')")
    phone.wait_for("!document.getElementById('chats').hidden")
    keep(phone, "page-chats-phone.png", tmp_path)
    assert phone.run("document.documentElement.scrollWidth") == 390
    tap(phone, "document.querySelector('#chat-list .chat')")
    phone.wait_for("document.getElementById('chats').hidden")
    assert phone.run(TURNS) == ["Hi", "Hello"]
    tap(phone, "document.getElementById('chats-button')")
    tap(phone, "document.getElementById('figures')")
    phone.wait_for("!document.getElementById('live').hidden")
    assert phone.run("document.getElementById('chats').hidden"), "one at a time"
    assert phone.run(FOCUSED) != "question"
