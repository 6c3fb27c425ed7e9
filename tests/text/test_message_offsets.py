"""Where the parts of a chat end in what a template makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.text.prompt.content_shapes import TOOLS
from saccade.text.prompt.message_offsets import MessageOffset, find_offsets, flagged
from saccade.text.prompt.template import ChatTemplate

TURN = "{% for m in messages %}[{{ m.role }}]"
PARTS = """{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}
{%- if p.type == 'image' %}<img>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}"""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "One \n"}, {"type": "image"}]},
    {"role": "assistant", "tool_calls": []},
    {"role": "user", "content": "Two."},
]


def located(
    source: str, chat: list[dict[str, Any]], shown: tuple[str, str] | None = None
) -> tuple[str, dict[str, str]]:
    """The prompt, and the text up to each place."""
    template = ChatTemplate({"default": source}, {}, shown=shown)
    text = template.render(chat)
    marked, places = flagged(chat)
    found = find_offsets(text, template.render(marked), places)
    return text, {name_of(each): text[: each.end] for each in found}


def name_of(mark: MessageOffset) -> str:
    if mark.message == TOOLS:
        return "tools"
    content = f"messages[{mark.message}].content"
    return content if mark.part is None else f"{content}[{mark.part}]"


def test_parts_end_where_a_template_that_trims_leaves_them() -> None:
    text, ends = located(TURN + PARTS + "{% endfor %}", CHAT)
    assert text == "[system]Be brief.[user]One<img>[assistant][user]Two."
    assert ends == {
        "messages[0].content": "[system]Be brief.",
        "tools": "[system]Be brief.[user]",
        "messages[1].content[0]": "[system]Be brief.[user]One",
        "messages[1].content[1]": "[system]Be brief.[user]One<img>",
        "messages[3].content": text,
    }


def test_an_image_ends_behind_what_the_family_puts_around_it() -> None:
    text, ends = located(TURN + PARTS + "{% endfor %}", CHAT, ("<img>", "\n\n<img>\n\n"))
    shown = "[system]Be brief.[user]One\n\n<img>\n\n"
    assert text == f"{shown}[assistant][user]Two."
    assert ends["messages[1].content[1]"] == shown and ends["messages[3].content"] == text


@pytest.mark.parametrize(
    "odd",
    [
        "{% if m.content is string and m.content.endswith('.') %}!{% endif %}",
        "{{ m.content | length }}",
    ],
)
def test_nothing_is_said_of_what_a_template_renders_otherwise_with_flags(odd: str) -> None:
    chat = [{"role": "user", "content": "ab"}, {"role": "user", "content": "Two."}]
    text, ends = located(TURN + odd + "{{ m.content }}{% endfor %}", chat)
    for place, prefix in ends.items():
        assert text.startswith(prefix), place
    assert len(ends["messages[1].content"]) < len(text)


def test_what_a_template_leaves_out_has_no_place() -> None:
    _, ends = located("{{ messages[-1].content }}", CHAT)
    assert ends == {"messages[3].content": "Two."}


def test_a_flag_that_a_client_writes_moves_no_place_beyond_it() -> None:
    chat = [{"role": "user", "content": "\U000f0003 one"}, {"role": "user", "content": "two"}]
    text, ends = located("{% for m in messages %}{{ m.content }};{% endfor %}", chat)
    assert all(prefix == "" for prefix in ends.values()) and text.startswith("\U000f0003")
