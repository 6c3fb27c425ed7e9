"""Computers and browsers through both vendors' unchanged SDKs: what the model writes becomes the
client's actions, in the screenshot's own pixels, and history goes back to the model's words. The
engine is the double that says what a test wants said. It acts as a Qwen3-VL does.
"""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from anthropic.types import (
    BrowserToolUseBlock,
    ComputerToolUseBlock,
    ImageDimensionsTooLargeErrorDetails,
)
from anthropic.types.beta import BetaComputerToolset20260801Param
from openai.types.responses import ResponseComputerToolCall

from saccade.plugins.computer import translate_actions
from saccade.plugins.computer.action import Action
from saccade.plugins.computer.find_format import find_action_format
from saccade.plugins.messages.toolsets import FAMILIES, SINGLE
from saccade.plugins.responses.computer import WORDS as OPENAI
from saccade.text.answer.answer_format import FORMATS, AnswerFormat
from saccade_bench.fixtures.pdf import Sheet, pdf
from tests.helpers.images import data_url, png
from tests.helpers.served import TOKENIZER, Served, serving
from tests.plugins.computer.test_action_formats import SIZES

COMPUTER = {"type": "computer"}
PREVIEW: dict[str, Any] = {
    "type": "computer_use_preview",
    "display_width": 800,
    "display_height": 600,
    "environment": "linux",
}
TOOLSET: BetaComputerToolset20260801Param = {"type": "computer_toolset_20260801"}
BROWSER = {"type": "browser_toolset_20260801"}
SINGLE_TOOL: dict[str, Any] = {
    "type": "computer_20251124",
    "name": "computer",
    "display_width_px": 800,
    "display_height_px": 600,
    "enable_zoom": True,
}
FUNCTION: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    with serving(answer_format=AnswerFormat(FORMATS["hermes"]), context=16_384) as served:
        yield served


def says(served: Served, *words: str) -> None:
    """Let the model say these, one after the other. The last stays."""
    queue = [TOKENIZER.encode(each) for each in words]
    served.engine.reply = lambda _: queue.pop(0) if len(queue) > 1 else queue[0]


def acts(**arguments: Any) -> str:
    call = {"name": "computer_use", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@cache
def shot(size: tuple[int, int]) -> str:
    return data_url(png(size=size))


def openai_user(size: tuple[int, int]) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "Go on."},
            {"type": "input_image", "image_url": shot(size)},
        ],
    }


def claude_image(size: tuple[int, int]) -> dict[str, Any]:
    data = shot(size).split(",", 1)[1]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def claude_user(size: tuple[int, int]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "Go on."}, claude_image(size)]}


def respond(served: Served, items: Any, tool: Any = COMPUTER, **fields: Any) -> Any:
    asked = {"max_output_tokens": 4000, **fields}
    return served.openai.responses.create(model="demo", input=items, tools=[tool], **asked)


def message(claude: Any, messages: Any, tool: Any = TOOLSET, **fields: Any) -> Any:
    return claude.messages.create(
        model="demo", max_tokens=4000, messages=messages, tools=[tool], **fields
    )


def openai_actions(response: Any) -> list[Action]:
    return [
        OPENAI.read("computer", action.to_dict(), "")
        for item in response.output
        if item.type == "computer_call"
        for action in item.actions or [item.action]
    ]


def claude_actions(answer: Any) -> list[Action]:
    found = []
    for block in answer.content:
        if block.type == "tool_use":
            words = SINGLE if block.toolset_name is None else FAMILIES[block.toolset_name]
            found.append(words.read(block.name, block.input, ""))
    return found


def unhurried(actions: list[Action]) -> list[Action]:
    """Without seconds, which OpenAI's `wait` has no place for."""
    return [replace(each, seconds=1) for each in actions]


POINTED = ("left_click", "right_click", "middle_click", "double_click", "mouse_move")
TEXTS = ("hello", 'ä "quoted"\n\\', "日本語 🙂", "")


def turn(choose: random.Random) -> list[dict[str, Any]]:
    """What a model does in one turn: one to three actions."""

    def at() -> list[int]:
        return [choose.randrange(1001), choose.randrange(1001)]

    def action() -> dict[str, Any]:
        word = choose.choice(
            (*POINTED, "left_click_drag", "scroll", "hscroll", "type", "key", "wait", "screenshot")
        )
        fields: dict[str, Any] = {"coordinate": at()}
        if word in ("scroll", "hscroll"):
            fields |= {"pixels": choose.choice([-700, -100, 100, 300])}
        elif word == "type":
            fields = {"text": choose.choice(TEXTS)}
        elif word == "key":
            fields = {
                "keys": choose.choice([["ctrl", "c"], ["enter"], ["alt", "f4"], ["pagedown"]])
            }
        elif word == "wait":
            fields = {"time": choose.randint(1, 9)}
        elif word == "screenshot":
            fields = {}
        return {"action": word, **fields}

    return [action() for _ in range(choose.randint(1, 3))]


TURNS = [turn(random.Random(seed)) for seed in range(40)]


@pytest.mark.first
@pytest.mark.parametrize("part", range(4))
def test_forty_turns_are_the_same_actions_through_every_toolset(
    served: Served, claude: Any, part: int
) -> None:
    block = pydantic.TypeAdapter(ComputerToolUseBlock)
    in_browser = pydantic.TypeAdapter(BrowserToolUseBlock)
    for number in range(part * 10, part * 10 + 10):
        size = SIZES[number % len(SIZES)]
        says(served, "I act.\n" + "\n".join(acts(**each) for each in TURNS[number]))
        response = respond(served, [openai_user(size)])
        (call,) = [item for item in response.output if item.type == "computer_call"]
        ResponseComputerToolCall.model_validate(call.to_dict(), strict=True)
        found = openai_actions(response)
        assert len(found) == len(TURNS[number])
        for point in (point for each in found for point in each.path):
            assert 0 <= point[0] < size[0] and 0 <= point[1] < size[1]
        display = {"display_width_px": size[0], "display_height_px": size[1]}
        for tool in (TOOLSET, {**SINGLE_TOOL, **display}, BROWSER):
            answer = message(claude, [claude_user(size)], tool)
            assert unhurried(claude_actions(answer)) == unhurried(found)
            assert answer.stop_reason == "tool_use"
            for each in answer.content[1:]:
                if tool is TOOLSET:
                    block.validate_python(each.to_dict())
                elif tool is BROWSER:
                    in_browser.validate_python(each.to_dict())
                else:
                    assert (each.name, each.toolset_name) == ("computer", None)


def nearest(number: int, units: int, size: int) -> int:
    """Halves go up, as `plugins/computer/screen.py` says."""
    return math.floor(Fraction(number * units, size) + Fraction(1, 2))


@pytest.mark.parametrize("in_pixels", [False, True])
@pytest.mark.more
def test_a_click_is_exact_on_every_screen(
    served: Served, claude: Any, monkeypatch: pytest.MonkeyPatch, in_pixels: bool
) -> None:
    """Through both SDKs and back, for a model that counts thousandths, and for one that counts the
    pixels of the image that it saw. Where it has a unit for each pixel, none moves.
    """
    step = served.front.intake.steps.step(translate_actions.TranslateActions)
    monkeypatch.setattr(step, "_in_pixels", in_pixels)
    exact = 0
    for size in SIZES:
        says(served, acts(action="screenshot"))
        respond(served, [openai_user(size)])
        height, width = served.submitted[-1].images[0].canvas
        units = (width, height) if in_pixels else (1000, 1000)
        for x, y in ((0, 0), (size[0] - 1, size[1] - 1), (size[0] // 3, size[1] // 7), (511, 399)):
            meant = list[int]()
            for pixel, count, side in zip((x, y), units, size, strict=True):
                meant.append(min(nearest(pixel, count, side), count - in_pixels))
            seen = tuple(
                min(nearest(unit, side, count), side - 1)
                for unit, count, side in zip(meant, units, size, strict=True)
            )
            says(served, acts(action="left_click", coordinate=meant))
            response = respond(served, [openai_user(size)])
            action = response.output[0].actions[0]
            answer = message(claude, [claude_user(size)])
            assert (action.x, action.y) == tuple(answer.content[0].input["coordinate"]) == seen
            for found, pixel, count, side in zip(seen, (x, y), units, size, strict=True):
                assert abs(found - pixel) <= max(0, math.ceil((side - count) / count))
                exact += found == pixel
        respond(served, [openai_user(size), *(each.to_dict() for each in response.output)])
        assert f'"coordinate": {meant}' in served.prompt
    assert exact > 50


def test_history_goes_back_to_the_model_s_own_words(served: Served, claude: Any) -> None:
    size = (1920, 1080)
    for turn in TURNS[:12]:
        says(served, "\n".join(acts(**each) for each in turn))
        first = respond(served, [openai_user(size)])
        result = {
            "type": "computer_call_output",
            "call_id": first.output[0].call_id,
            "output": {"type": "computer_screenshot", "image_url": shot(size)},
            "acknowledged_safety_checks": [],
        }
        items = [openai_user(size), *(each.to_dict() for each in first.output), result]
        respond(served, items)
        openais = served.prompt
        answer = message(claude, [claude_user(size)])
        results = [
            {"type": "tool_result", "tool_use_id": each.id, "content": [claude_image(size)]}
            for each in answer.content
        ]
        told = [each.to_dict() for each in answer.content]
        after = {"role": "assistant", "content": told}, {"role": "user", "content": results}
        message(claude, [claude_user(size), *after])
        for text in (openais, served.prompt):
            for action in turn:
                if action["action"] not in ("wait", "left_click_drag"):
                    assert acts(**action) in text
                elif "coordinate" in action:
                    assert f'"coordinate": {action["coordinate"]}' in text


def test_a_stored_call_is_continued_and_listed(served: Served) -> None:
    says(served, acts(action="left_click", coordinate=[500, 500]))
    first = respond(served, [openai_user((1280, 720))])
    upload = served.openai.files.create(file=("a.png", png(size=(1280, 720))), purpose="vision")
    result = {
        "type": "computer_call_output",
        "call_id": first.output[0].call_id,
        "output": {"type": "computer_screenshot", "file_id": upload.id},
        "acknowledged_safety_checks": [{"id": "s", "code": "c", "message": "m"}],
    }
    second = respond(served, [result], previous_response_id=first.id)
    assert acts(action="left_click", coordinate=[500, 500]) in served.prompt
    assert len(served.submitted[-1].images) == 2
    listed = served.openai.responses.input_items.list(second.id).data
    assert {each.type for each in listed} == {"message", "computer_call", "computer_call_output"}
    call = next(each for each in listed if each.type == "computer_call")
    assert call.actions[0].to_dict() == {"type": "click", "button": "left", "x": 640, "y": 360}
    kept = next(each for each in listed if each.type == "computer_call_output")
    assert kept.acknowledged_safety_checks[0].message == "m"
    assert served.openai.responses.retrieve(first.id).output[0].type == "computer_call"
    counted = served.openai.responses.input_tokens.count(
        model="demo", input=[result], tools=[COMPUTER], previous_response_id=first.id
    )
    assert counted.input_tokens == len(served.submitted[-1].tokens)


def test_streams_are_what_the_sdks_read(served: Served, claude: Any) -> None:
    two = acts(action="left_click", coordinate=[0, 0]), acts(action="type", text="é")
    says(served, "Now.\n" + "\n".join(two))
    asked: Any = {"model": "demo", "input": [openai_user((800, 600))], "tools": [COMPUTER]}
    with served.openai.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    added, done = [
        [each.item for each in events if each.type == f"response.output_item.{name}"]
        for name in ("added", "done")
    ]
    assert [each.type for each in added] == ["message", "computer_call"]
    assert added[1].actions == [] and added[1].status == "in_progress"
    assert done[1].status == "completed" and len(done[1].actions) == 2
    assert final.output[1].to_dict() == done[1].to_dict()
    with claude.messages.stream(
        model="demo", max_tokens=999, messages=[claude_user((800, 600))], tools=[TOOLSET]
    ) as stream:
        list(stream)
        whole = stream.get_final_message()
    assert [each.type for each in whole.content] == ["text", "tool_use", "tool_use"]
    assert whole.content[1].input == {"coordinate": [0, 0]}
    assert (whole.content[1].toolset_name, whole.content[1].caller.type) == ("computer", "direct")


def test_a_preview_acts_once_in_a_call(served: Served) -> None:
    two = acts(action="left_click", coordinate=[500, 500]), acts(action="wait", time=3)
    says(served, "\n".join(two))
    response = respond(served, "Go on.", PREVIEW)
    assert [item.type for item in response.output] == ["computer_call"] * 2
    first, second = response.output
    assert (first.action.x, first.action.y, first.actions) == (400, 300, None)
    assert second.action.type == "wait"
    response = respond(served, "Go on.", PREVIEW, parallel_tool_calls=False)
    assert len(response.output) == 1


def test_a_computer_stands_beside_functions(served: Served, claude: Any) -> None:
    look = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    says(served, acts(action="screenshot") + "\n" + look)
    response = served.openai.responses.create(
        model="demo", input="Go on.", tools=[COMPUTER, FUNCTION]
    )
    assert [item.type for item in response.output] == ["computer_call", "function_call"]
    custom = {"name": "look", "input_schema": {"type": "object"}}
    answer = claude.messages.create(
        model="demo",
        max_tokens=999,
        messages=[{"role": "user", "content": "Go on."}],
        tools=[custom, TOOLSET],
    )
    assert [(each.name, each.toolset_name) for each in answer.content] == [
        ("screenshot", "computer"),
        ("look", None),
    ]
    for tools, param in (
        ([COMPUTER, {**FUNCTION, "name": "computer_use"}], "tools[1].name"),
        ([COMPUTER, PREVIEW], "tools[1]"),
        ([{**COMPUTER, "size": 3}], "tools[0].size"),
    ):
        with pytest.raises(openai.BadRequestError) as found:
            served.openai.responses.create(model="demo", input="Go on.", tools=tools)
        assert found.value.param == param


def test_a_choice_is_a_grammar_s(served: Served, claude: Any) -> None:
    says(served, acts(action="screenshot"))
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [COMPUTER]}
    for choice in ("required", COMPUTER, {"type": "computer_use_preview"}, allowed):
        respond(served, [openai_user((800, 600))], tool_choice=choice)
        must = served.submitted[-1].grammar
        assert must and "AFTER" not in must and '\\"const\\": \\"answer\\"' not in must
        assert '"const": "terminate"' not in must and '"const": "left_click"' in must
    respond(served, [openai_user((800, 600))])
    assert "AFTER" in served.submitted[-1].grammar
    respond(served, [openai_user((800, 600))], tool_choice="none")
    assert not served.submitted[-1].grammar and "computer_use" in served.prompt
    for choice in ({"type": "any"}, {"type": "tool", "name": "computer"}):
        message(claude, [claude_user((800, 600))], tool_choice=choice)
        assert "AFTER" not in served.submitted[-1].grammar
    with pytest.raises(openai.BadRequestError) as found:
        respond(served, "Go on.", FUNCTION, tool_choice=COMPUTER)
    assert found.value.param == "tool_choice"


def test_no_place_is_meant_before_a_screenshot(served: Served) -> None:
    says(served, acts(action="screenshot"))
    respond(served, "Go on.")
    before = served.submitted[-1].grammar
    assert '"const": "screenshot"' in before and '"const": "left_click"' not in before
    respond(served, "Go on.", PREVIEW)
    assert '"const": "left_click"' in served.submitted[-1].grammar


def test_a_part_that_zoom_has_shown_is_no_screenshot(served: Served, claude: Any) -> None:
    says(served, acts(action="zoom", region=[0, 0, 500, 500]))
    asked: list[Any] = [claude_user((1280, 720))]
    answer = message(claude, asked)
    assert answer.content[0].input == {"region": [0, 0, 640, 360]}
    asked.append({"role": "assistant", "content": [answer.content[0].to_dict()]})
    used = answer.content[0].id
    shown = {"type": "tool_result", "tool_use_id": used, "content": [claude_image((300, 300))]}
    asked.append({"role": "user", "content": [shown]})
    says(served, acts(action="left_click", coordinate=[500, 500]))
    assert message(claude, asked).content[0].input == {"coordinate": [640, 360]}
    assert acts(action="zoom", region=[0, 0, 500, 500]) in served.prompt
    without = {**SINGLE_TOOL, "enable_zoom": False}
    message(claude, [claude_user((800, 600))], without)
    assert "zoom" not in served.prompt


def test_what_is_no_screenshot_moves_no_coordinates(served: Served, claude: Any) -> None:
    """A part of the screen that a result shows, and a page of a PDF."""
    says(served, acts(action="left_click", coordinate=[500, 500]))
    past: dict[str, Any] = {"type": "computer_call", "call_id": "c", "status": "completed"}
    past["actions"] = [{"type": "screenshot"}]
    output = {"type": "computer_screenshot", "image_url": shot((1280, 720))}
    part = {**output, "region": [100, 100, 300, 200]}
    items = [openai_user((1280, 720)), past]
    for shown, canvas in ((output, None), (part, (96, 192))):
        answer = {"type": "computer_call_output", "call_id": "c", "output": shown}
        response = respond(served, [*items, answer])
        action = response.output[0].actions[0]
        assert (action.x, action.y) == (640, 360)
        assert canvas in (None, served.submitted[-1].images[-1].canvas)
    report = base64.b64encode(pdf([Sheet(["one"], size=(64, 96))])).decode()
    page = {"type": "base64", "media_type": "application/pdf", "data": report}
    for option in ({}, {"page": 1, "region": [0, 0, 50, 50]}):
        asked = claude_user((1280, 720))
        asked["content"].append({"type": "document", "source": page, **option})
        assert message(claude, [asked]).content[0].input == {"coordinate": [640, 360]}


def test_an_element_is_clicked_and_keys_are_held(served: Served, claude: Any) -> None:
    """As each API says it: in `keys`, `text`, `modifiers` and `target`."""
    place = {"coordinate": [500, 500]}
    held = acts(action="left_click", **place, keys=["ctrl"])
    says(served, held)
    response = respond(served, [openai_user((800, 600))])
    action = response.output[0].actions[0]
    assert (action.type, action.keys, action.x) == ("click", ["CTRL"], 400)
    ResponseComputerToolCall.model_validate(response.output[0].to_dict(), strict=True)
    answer = message(claude, [claude_user((800, 600))])
    block = answer.content[0]
    assert (block.name, block.input) == ("left_click", {"coordinate": [400, 300], "text": "ctrl"})
    pydantic.TypeAdapter(ComputerToolUseBlock).validate_python(block.to_dict())
    says(served, held + "\n" + acts(action="click_element", ref="ref_7", keys=["shift"]))
    answer = message(claude, [claude_user((800, 600))], BROWSER)
    target = {"type": "coordinate", "x": 400, "y": 300}
    assert [each.input for each in answer.content] == [
        {"target": target, "modifiers": "ctrl"},
        {"target": {"type": "ref", "ref": "ref_7"}, "modifiers": "shift"},
    ]
    for each in answer.content:
        pydantic.TypeAdapter(BrowserToolUseBlock).validate_python(each.to_dict())
    told = {"role": "assistant", "content": [each.to_dict() for each in answer.content]}
    results = [
        {"type": "tool_result", "tool_use_id": each.id, "content": "Done."}
        for each in answer.content
    ]
    again = [claude_user((800, 600)), told, {"role": "user", "content": results}]
    message(claude, again, BROWSER)
    history = served.prompt
    assert held in history
    assert acts(action="click_element", ref="ref_7", keys=["shift"]) in history
    assert "hover_element" in history, "a browser's model is told of it"
    respond(served, [openai_user((800, 600))])
    assert "click_element" not in served.prompt


def test_the_first_use_says_that_a_model_has_no_way_of_its_own(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = find_action_format("minicpmv4_6", "openbmb/MiniCPM")
    monkeypatch.setattr(translate_actions, "find_action_format", lambda *_: plain)
    with caplog.at_level("INFO", "saccade"):
        translate_actions.TranslateActions(served.front.intake.steps)
    told = "plain (a tool of ours: this model publishes no way to act)"
    assert [each.message for each in caplog.records] == [f"computer use: {told}"]


def test_members_that_are_off_are_not_offered(served: Served, claude: Any) -> None:
    configs: Any = {"zoom": {"enabled": False}, "key": None, "double_click": {"enabled": False}}
    message(claude, [claude_user((800, 600))], {**TOOLSET, "configs": configs})
    told = served.prompt
    assert "double_click" not in told and "zoom" not in told and "triple_click" in told
    message(claude, [claude_user((800, 600))], BROWSER)
    assert "browser_navigate" in served.prompt
    assert "browser_javascript_exec" not in served.prompt
    configs = {"javascript_exec": {"enabled": True}}
    message(claude, [claude_user((800, 600))], {**BROWSER, "configs": configs})
    assert "browser_javascript_exec" in served.prompt


def test_a_browser_s_functions_are_its_own(served: Served, claude: Any) -> None:
    call = {"name": "browser_navigate", "arguments": {"url": "example.com"}}
    says(served, f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    answer = message(claude, [{"role": "user", "content": "Go on."}], BROWSER)
    (used,) = answer.content
    assert (used.name, used.toolset_name, used.input) == (
        "navigate",
        "browser",
        {"url": "example.com"},
    )
    state = {
        "type": "browser_state",
        "tabs": [
            {"tab_id": "t1", "title": "Example", "url": "https://example.com", "active": True}
        ],
        "state_changes": [{"type": "tab_opened", "tab_id": "t1"}],
    }
    done = {"type": "tool_result", "tool_use_id": used.id, "content": [state], "is_error": False}
    asked = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": [used.to_dict()]},
        {"role": "user", "content": [{**done, "toolset_name": "browser"}]},
    ]
    says(served, "Done.")
    message(claude, asked, BROWSER)
    told = served.prompt
    assert json.dumps(call) in told and "- t1 (active): Example https://example.com" in told
    counted = claude.messages.count_tokens(model="demo", messages=asked, tools=[BROWSER])
    assert counted.input_tokens == len(served.submitted[-1].tokens)
    message(claude, asked, {"name": "look", "input_schema": {"type": "object"}})
    assert "browser_navigate" in served.prompt.split("<|im_start|>user")[1]


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({**SINGLE_TOOL, "display_width_px": 0}, "tools[0].display_width_px"),
    ({**SINGLE_TOOL, "display_height_px": -5}, "tools[0].display_height_px"),
    ({**SINGLE_TOOL, "display_height_px": 10**9}, "tools[0].display_height_px"),
    ({**SINGLE_TOOL, "display_height_px": 1.5}, "tools[0].display_height_px"),
    ({**SINGLE_TOOL, "name": "pc"}, "tools[0].name"),
    ({**SINGLE_TOOL, "wheels": 4}, "tools[0].wheels"),
    ({**TOOLSET, "configs": {"fly": {}}}, "tools[0].configs.fly"),
    ({**TOOLSET, "configs": {"key": {"enabled": "yes"}}}, "tools[0].configs"),
    ({**TOOLSET, "configs": {"key": {"defer_loading": True}}}, "tools[0].configs"),
    ({"type": "computer_20990101"}, "tools[0].type"),
]


@pytest.mark.parametrize("bad", BAD_TOOLS, ids=range(len(BAD_TOOLS)))
def test_a_fault_of_a_tool_names_its_field(claude: Any, bad: Any) -> None:
    tool, param = bad
    with pytest.raises(anthropic.BadRequestError) as found:
        message(claude, [{"role": "user", "content": "Go on."}], tool)
    assert param in str(found.value)


CLICK = {"type": "click", "button": "left"}
BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"actions": [{"type": "fly"}]}, "input[1].actions[0].type"),
    ({"actions": [{**CLICK, "x": 800, "y": 0}]}, "input[1].actions[0]"),
    ({"actions": [{**CLICK, "x": 0, "y": 600}]}, "input[1].actions[0]"),
    ({"actions": [{**CLICK, "x": 10**9, "y": 0}]}, "input[1].actions[0].x"),
    ({"actions": []}, "input[1].actions"),
    ({"actions": [{"type": "keypress", "keys": []}]}, "input[1].actions[0].keys"),
    ({"actions": [{"type": "wait"}] * 500}, "input[1].actions"),
    ({}, "input[1]"),
    ({"action": {"type": "wait"}, "actions": [{"type": "wait"}]}, "input[1]"),
    ({"actions": "wait"}, "input[1].actions"),
]


@pytest.mark.parametrize("bad", BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_a_fault_of_history_names_its_field(served: Served, bad: Any) -> None:
    call, param = bad
    past = {"type": "computer_call", "call_id": "c", "pending_safety_checks": [], **call}
    with pytest.raises(openai.BadRequestError) as found:
        respond(served, [openai_user((800, 600)), past])
    assert found.value.param == param


def test_an_edit_knows_a_computer_by_the_client_s_name(served: Served, claude: Any) -> None:
    click = {"action": "left_click", "coordinate": [400, 300]}
    call = {"type": "tool_use", "id": "a", "name": "computer", "input": click}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "It opened."}
    asked: Any = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    edit: dict[str, Any] = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 0},
        "keep": {"type": "tool_uses", "value": 0},
    }
    for more, stays in (({}, False), ({"exclude_tools": ["computer"]}, True)):
        answer = claude.beta.messages.create(
            model="demo",
            max_tokens=99,
            messages=asked,
            tools=[SINGLE_TOOL],
            context_management={"edits": [{**edit, **more}]},
        )
        assert ("It opened." in served.prompt) is stays
        assert len(answer.context_management.applied_edits) == (not stays)


def test_a_screen_that_is_trimmed_away_is_known_by_the_next(served: Served) -> None:
    call = {"type": "computer_call", "call_id": "c", "status": "completed"}
    past = {**call, "actions": [{**CLICK, "x": 640, "y": 360}]}
    output = {"type": "computer_screenshot", "image_url": shot((1280, 720))}
    result = {"type": "computer_call_output", "call_id": "c", "output": output}
    respond(served, [{"role": "user", "content": "Go on."}, past, result])
    assert acts(action="left_click", coordinate=[500, 500]) in served.prompt
    respond(served, [{"role": "user", "content": "Go on."}, past, result], FUNCTION)
    assert "Go on." in served.prompt


def test_a_call_outside_the_next_screen_is_refused_where_its_own_is_gone(
    served: Served, claude: Any
) -> None:
    past = {"type": "computer_call", "call_id": "c", "actions": [{**CLICK, "x": 5000, "y": 20}]}
    output = {"type": "computer_screenshot", "image_url": shot((512, 256))}
    result = {"type": "computer_call_output", "call_id": "c", "output": output}
    with pytest.raises(openai.BadRequestError) as found:
        respond(served, [{"role": "user", "content": "Go on."}, past, result])
    assert found.value.param == "input[1].actions[0]" and "512 x 256" in found.value.message
    call: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "left_click"}
    call["toolset_name"] = "computer"
    call["input"] = {"coordinate": [5000, 20]}
    seen = {"type": "tool_result", "tool_use_id": "a", "content": [claude_image((512, 256))]}
    messages = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [seen]},
    ]
    with pytest.raises(anthropic.BadRequestError) as refused:
        message(claude, messages)
    assert "messages[1].content[0].input" in str(refused.value)


def test_a_request_without_a_screen_enters_nothing_of_it(served: Served) -> None:
    order = served.front.intake.order
    entered: list[object] = []
    joined = order.joined

    def counted(preparation: Any, walk: Any) -> Iterator[Any]:
        for step in joined(preparation, walk):
            entered.append(type(step.__self__))  # type: ignore[attr-defined]
            yield step

    order.joined = counted  # type: ignore[method-assign]
    try:
        respond(served, [openai_user((800, 600))], FUNCTION)
        assert entered and translate_actions.TranslateActions not in entered
        respond(served, [openai_user((800, 600))])
        assert translate_actions.TranslateActions in entered
    finally:
        del order.joined


@pytest.fixture(scope="module")
def tars() -> Iterator[Served]:
    """A model by the name of UI-TARS, of a family whose coordinates are thousandths."""
    silent = AnswerFormat(FORMATS["hermes"])
    with serving(answer_format=silent, context=8192, model="org/UI-TARS-7B") as served:
        yield served


def test_a_model_that_acts_in_text_is_read_and_told_in_text(tars: Served) -> None:
    with anthropic.Anthropic(api_key="x", base_url=tars.address, max_retries=0) as claude:
        said = "Thought: It is\nthere.\nAction: click(start_box='(500,250)')"
        says(tars, said)
        answer = message(claude, [claude_user((800, 600))])
        assert answer.content[0].text == "Thought: It is\nthere."
        assert answer.content[1].input == {"coordinate": [400, 150]}
        assert "## Action Space" in tars.prompt and "<tools>" not in tars.prompt
        used = answer.content[1].id
        result = {"type": "tool_result", "tool_use_id": used, "content": [claude_image((800, 600))]}
        told = [each.to_dict() for each in answer.content]
        asked = [
            claude_user((800, 600)),
            {"role": "assistant", "content": told},
            {"role": "user", "content": [result]},
        ]
        says(
            tars,
            r"Thought: Done.\nAction: finished(content='It\'s \"é\"\nthere')".replace(
                "d.\\n", "d.\n"
            ),
        )
        final = message(claude, asked)
        assert (
            final.content[0].text.endswith('It\'s "é"\nthere') and final.stop_reason == "end_turn"
        )
        assert said in tars.prompt and tars.prompt.count("## Action Space") == 1
        says(tars, "Thought: Type.\nAction: type(content='a\\'b, c)\\n')")
        response = respond(tars, [openai_user((800, 600))])
        assert response.output[1].actions[0].text == "a'b, c)\n"
        assert "THOUGHT" not in tars.submitted[-1].grammar
        respond(tars, [openai_user((800, 600))], tool_choice="required")
        assert "THOUGHT" in tars.submitted[-1].grammar
        with pytest.raises(openai.BadRequestError) as found:
            tars.openai.responses.create(model="demo", input="Go on.", tools=[COMPUTER, FUNCTION])
        assert found.value.param == "tools"


def test_an_image_that_may_not_be_downsized_is_refused_with_the_size_that_fits(
    claude: Any, served: Served
) -> None:
    def shown(size: tuple[int, int], wish: str = "error") -> dict[str, Any]:
        return {**claude_image(size), "transformations": {"oversized_image": wish}}

    large, small = shown((3000, 2000)), shown((640, 480))
    result = {"type": "tool_result", "tool_use_id": "a", "content": [small, large]}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    asked: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Look."}, large]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    for ask in (claude.messages.create, claude.messages.count_tokens):
        more = {"max_tokens": 5} if ask == claude.messages.create else {}
        with pytest.raises(anthropic.BadRequestError) as found:
            ask(model="demo", messages=asked, **more)
        details: Any = found.value.details
        ImageDimensionsTooLargeErrorDetails.model_validate(details.to_dict(), strict=True)
        assert details.paths == ["messages.0.content.1", "messages.2.content.0.content.1"]
        side = details.max_side_length_pixels
        assert "3000 x 2000" in found.value.message and str(side) in found.value.message
    narrower = shown((side, side * 2 // 3))
    for content in ([small], [narrower], [shown((3000, 2000), "downsize")]):
        said = claude.messages.create(
            model="demo", max_tokens=5, messages=[{"role": "user", "content": content}]
        )
        assert said.content
    bounded = {**small, "max_pixels": 64 * 64}
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(
            model="demo", max_tokens=5, messages=[{"role": "user", "content": [bounded]}]
        )
