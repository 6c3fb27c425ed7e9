"""A template that joins strings is given strings, and one that walks parts is given parts."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.text.prompt.message_offsets import find_offsets, flagged
from saccade.text.prompt.template import ChatTemplate
from tests.text import templates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
JOINING = {
    "smollm": templates.SMOLLM,
    "llama2": templates.LLAMA2,
    "zephyr": templates.ZEPHYR,
    "mistral": templates.MISTRAL,
    "llama3": templates.LLAMA,
    "qwen3": templates.QWEN3_TEXT,
    "print": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "json": "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}",
}
WALKING = {
    "qwen2-vl": templates.QWEN2_VL,
    "qwen3-vl": templates.QWEN3_VL,
    "qwen3.5": templates.THINKING,
    "glm": templates.GLM,
    "llama3-vision": templates.LLAMA_VISION,
}
TOOL: Any = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}
CALL: Any = {"id": "callproof", "type": "function", "function": {"name": "zoom", "arguments": {}}}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, TOKENS)


def said(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def plain(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("source", [*JOINING.values(), *WALKING.values()])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_one_part_is_the_string(source: str, tools: Any) -> None:
    talk = [("user", "One?"), ("assistant", "Two."), ("user", "Three?")]
    ours = template(source)
    as_text = ours.render([plain(*each) for each in talk], tools)
    assert ours.render([said(*each) for each in talk], tools) == as_text
    assert "One?" in as_text and "Three?" in as_text


@pytest.mark.parametrize("name", sorted({*JOINING} - {"mistral"}))
def test_so_is_one_of_the_system(name: str) -> None:
    ours = template(JOINING[name])
    as_text = ours.render([plain("system", "Be brief."), plain("user", "One?")])
    assert ours.render([said("system", "Be brief."), said("user", "One?")]) == as_text


@pytest.mark.parametrize("source", JOINING.values(), ids=JOINING)
def test_several_texts_become_lines(source: str) -> None:
    ours = template(source)
    lines = ours.render([plain("user", "One\nTwo")])
    assert ours.render([said("user", "One", "Two")]) == lines
    assert ours.render([said("user", "", "One", "", "Two", "")]) == lines
    assert ours.render([said("user")]) == ours.render([plain("user", "")])


@pytest.mark.parametrize("source", WALKING.values(), ids=WALKING)
def test_a_template_that_walks_parts_sees_each(source: str) -> None:
    both = template(source).render([said("user", "One", "Two")])
    assert "OneTwo" in both


@pytest.mark.parametrize("name", ["smollm", "zephyr", "llama2", "mistral", "llama3", "qwen3"])
def test_an_answer_in_parts_is_continued(name: str) -> None:
    ours = template(JOINING[name])
    talk = [plain("user", "One?")]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours.render([*talk, plain("assistant", "Well, ")], **options)
    assert ours.render([*talk, said("assistant", "Well, ")], **options) == text
    assert text.endswith(("Well, ", "Well,"))


@pytest.mark.parametrize("name", ["smollm", "zephyr", "mistral", "llama3", "qwen3", "json"])
def test_a_call_without_content_is_rendered(name: str) -> None:
    call = {"role": "assistant", "tool_calls": [CALL]}
    ours = template(JOINING[name])
    talk = [plain("user", "One?"), call]
    text = ours.render(talk)
    assert text == ours.render([talk[0], {**call, "content": ""}])
    assert "None" not in text


def test_each_role_has_its_own_shape() -> None:
    ours = template(templates.MIXED)
    call = {"role": "assistant", "tool_calls": [CALL]}
    tool = {"tool_call_id": CALL["id"]}
    image = {"type": "image"}
    talk = [said("system", "Be", "brief."), {"role": "user", "content": [image]}]
    talk += [call, {**said("tool", "sunny"), **tool}, said("assistant", "Sun."), plain("user", "?")]
    calls = '[CALLS][{"id": "callproof", "type": "function", "function": {"name": "zoom", '
    assert ours.render(talk) == (
        "[SYS]Be\nbrief.[/SYS][INST][IMG][/INST]" + calls + '"arguments": {}}}]'
        '[TOOL]{"content": sunny}[/TOOL]Sun.</s>[INST]?[/INST]'
    )


def test_a_template_that_shows_the_first_part_alone_is_given_a_string() -> None:
    ours = template(templates.FIRST_PART)
    shown = {"role": "user", "content": [{"type": "text", "text": "One?"}, {"type": "image"}]}
    assert ours.render([said("system", "Be", "brief."), shown]) == (
        "<s><start_of_turn>user\nBe\nbrief.One?<start_of_image><end_of_turn>\n"
    )
    assert ours.hidden([said("system", "Be", "brief."), shown], None) is None


def test_tools_may_change_the_shape() -> None:
    ours = template(templates.LLAMA_VISION)
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "One?"}]}]
    assert ours.render(shown) == "<s><|user|><|image|>One?<|assistant|>"
    with_tools = ours.render([plain("system", "Look."), *shown], [TOOL])
    assert with_tools.endswith("Look.<|user|><|image|>One?<|assistant|>")
    assert ours.hidden(shown, None) is None
    assert ours.render([said("user", "One?")], [TOOL]).endswith("]One?<|assistant|>")


@pytest.mark.parametrize("source", JOINING.values(), ids=JOINING)
def test_an_image_has_no_place_where_strings_are_joined(source: str) -> None:
    talk = [plain("user", "One?"), plain("assistant", "Two.")]
    image = {"role": "user", "content": [{"type": "text", "text": "Three?"}, {"type": "image"}]}
    assert template(source).hidden([*talk, image], None) == (2, 1)
    assert template(source).hidden([*talk, said("user", "Three?")], None) is None


@pytest.mark.parametrize("name", ["smollm", "llama3", "llama2"])
def test_the_ends_of_joined_parts_are_found(name: str) -> None:
    ours = template(JOINING[name])
    chat = [said("system", "Be ", "", "brief."), said("user", "One?", " Two? ")]
    text = ours.render(chat)
    marked, places = flagged(chat)
    ends = {
        (each.message, each.part): text[: each.end]
        for each in find_offsets(text, ours.render(marked), places)
    }
    assert ends[0, 0].endswith("Be") and ends[0, 2].endswith("Be \nbrief.")
    assert ends[1, 0].endswith("One?") and ends[1, 1].endswith("One?\n Two?")
