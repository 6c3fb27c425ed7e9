"""The contract of action formats, over every one that is found, beside every client's words: what a
model may write is an action that the client has a word for, and comes back in the same words.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import saccade
from saccade.core.errors import InvalidRequest
from saccade.plugins.computer import find_format, formats
from saccade.plugins.computer.action import Action
from saccade.plugins.computer.action_format import ActionFormat
from saccade.plugins.computer.action_tool import ActionTool
from saccade.plugins.computer.find_format import find_action_format, find_action_formats
from saccade.plugins.computer.keys import ours, read_chord, spelt
from saccade.plugins.computer.screen import Axis, Screen
from saccade.plugins.computer.translator import ActionTranslator
from saccade.plugins.computer.vocabulary import ActionWords, placed
from saccade.plugins.computer.word_fields import at_most
from saccade.plugins.grammar.grammars import Grammars
from saccade.plugins.grammar.matchers import Matchers
from saccade.plugins.grammar.tool_choice import read_tool_choice
from saccade.plugins.messages.toolsets import FAMILIES, SINGLE
from saccade.plugins.responses.computer import WORDS as OPENAI
from saccade.text.answer.answer_format import FORMATS
from saccade.text.answer.reader import AnswerReader, gather
from saccade.text.answer.tool_format import ToolFormat
from tests.text.lexicons import DEMO_ENDS, DEMO_VOCAB, demo_lexicon
from tests.text.walks import walk

PACKAGE = Path(saccade.__file__).parent
SIZES = [
    (640, 480),
    (800, 600),
    (1000, 1000),
    (1024, 768),
    (1280, 720),
    (1366, 768),
    (1920, 1080),
    (1080, 2400),
    (768, 1366),
    (3840, 2160),
]
"""Screens, with a phone's, an upright one and 4K among them."""
SCREEN = (1366, 768)
CLIENTS = {
    "openai": ActionTool("computer", "tools[0]", OPENAI, "computer"),
    "single": ActionTool("computer", "tools[0]", SINGLE, display=SCREEN),
    **{name: ActionTool(name, "tools[0]", words, name) for name, words in FAMILIES.items()},
}
READS = {"openai": OPENAI, "single": SINGLE, **FAMILIES}


@pytest.fixture(params=find_action_formats().values(), ids=[*find_action_formats()])
def form(request: pytest.FixtureRequest) -> ActionFormat:
    found: ActionFormat = request.param
    return found


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def translator(form: ActionFormat, client: str) -> ActionTranslator:
    return ActionTranslator(form, CLIENTS[client], in_pixels=True)


def screen_of(form: ActionFormat) -> Screen:
    in_pixels = form.in_pixels("qwen2_5_vl")
    return Screen.in_pixels(SCREEN, (1372, 756)) if in_pixels else Screen.in_thousandths(SCREEN)


def calls_format(form: ActionFormat) -> ToolFormat:
    return FORMATS["hermes"] if form.written is None else form.written.calls


@cache
def matchers() -> Matchers:
    return Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)


@cache
def grammars() -> Grammars:
    return Grammars(demo_lexicon(), DEMO_VOCAB)


def drawn(form: ActionFormat, client: str, seeds: int) -> list[str]:
    """Answers that must act, as a model with random weights would write them."""
    tools = translator(form, client).tools(screen_of(form), must=True)
    spelling = calls_format(form).syntax.grammar(demo_lexicon())
    made = read_tool_choice("required", tools, spelling, parallel=True)
    assert made is not None
    text = grammars().compile(made).text
    found = (walk(matchers(), demo_lexicon(), text, s, DEMO_ENDS, jump=True) for s in range(seeds))
    return [each for each in found if each is not None]


def test_a_format_is_found_by_family_and_name() -> None:
    names = {family: find_action_format(family, "").name for family in FAMILIES_BY_FORMAT}
    assert names == FAMILIES_BY_FORMAT
    assert find_action_format("qwen2_5_vl", "ByteDance-Seed/UI-TARS-1.5-7B").name == "ui_tars"
    assert len({each.order for each in find_action_formats().values()}) == 3


FAMILIES_BY_FORMAT = {
    "qwen3_vl": "computer_use",
    "qwen3_vl_moe": "computer_use",
    "qwen3_5": "computer_use",
    "qwen2_5_vl": "computer_use",
    "qwen2_vl": "plain",
    "step3_vl": "plain",
    "minicpmv4_6": "plain",
}


def test_no_shared_file_names_a_format_or_a_family() -> None:
    names = re.compile(r"ui.?tars|computer_use|qwen|minicpm|step3", re.IGNORECASE)
    shared = [*(PACKAGE / "plugins" / "computer").glob("*.py"), *PACKAGE.glob("front/steps/*.py")]
    assert len(shared) > 15
    assert not [path for path in shared if names.search(path.read_text())]


def test_what_a_model_may_write_is_an_action_of_the_client_s(
    form: ActionFormat, client: str
) -> None:
    tool, screen = translator(form, client), screen_of(form)
    texts, kinds = drawn(form, client, 12), set()
    assert len(texts) > 6
    schemas = {each.name: each.parameters for each in tool.tools(screen, must=True)}
    for number, text in enumerate(texts):
        inner = AnswerReader(None, calls_format(form), schemas, eager=number % 2 > 0)
        reader = tool.reader(inner, screen, None)
        pieces = [*text] if number % 3 else [text]
        answer = gather([e for piece in pieces for e in reader.feed(piece)] + reader.end())
        assert answer.calls, text
        for call in answer.calls:
            action = READS[client].read(call.name, json.loads(call.arguments), "call")
            kinds.add(action.kind)
            assert all(screen.holds(point) for point in action.path), text
            again = READS[client].write(action)
            assert again is not None and again[0] == call.name
    assert len(kinds) >= 3


def test_history_comes_back_from_the_model_s_words(form: ActionFormat, client: str) -> None:
    tool, screen = translator(form, client), Screen.in_thousandths((500, 400))
    for name, word in tool.words.items():
        if word.kind == "answer":
            continue
        for said in placed(word.sample(), (3, 4)):
            if (written := CLIENTS[client].writes.write(said)) is None:
                continue
            action = READS[client].read(*written, "call")
            told = tool.told(action, READS[client], screen)
            back = tool.action(*told[-1], screen)
            fitting = [*placed(back, action.path[0] if len(told) > 1 else (3, 4))]
            assert replace(action, seconds=1) in [replace(e, seconds=1) for e in fitting], name


def test_what_a_model_has_no_word_for_is_told_in_the_client_s(form: ActionFormat) -> None:
    screen = Screen.in_thousandths((500, 400))
    tool = translator(form, "openai")
    back = OPENAI.read("computer", {"type": "click", "button": "back", "x": 250, "y": 100}, "c")
    ((name, arguments),) = tool.told(back, OPENAI, screen)
    assert (arguments["x"], arguments["y"], arguments["button"]) == (500, 250, "back")
    assert name == (form.vocabulary.tool or "click")


def test_no_place_can_be_meant_before_a_screenshot(form: ActionFormat, client: str) -> None:
    before = translator(form, client).tools(None, must=False)
    after = translator(form, client).tools(screen_of(form), must=False)
    assert len(str(before)) < len(str(after))
    cases = [case for each in before for case in each.cases or (each.parameters,)]
    points = {"coordinate", "start", "region", "start_box", "x"}
    assert not any(points & {*case["properties"]} for case in cases)
    assert form.describe is None or "left_click" in str(after[0].parameters)


def called(tool: ActionTranslator, client: str, **arguments: Any) -> Action | None:
    """What a client is told to do by a model's call, if it is an action."""
    call = {"name": "computer_use", "arguments": arguments}
    if tool.form.vocabulary.tool != "computer_use":
        call["name"] = tool.form.vocabulary.tool
    text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    inner = AnswerReader(None, FORMATS["hermes"], {str(call["name"]): {}}, eager=False)
    reader = tool.reader(inner, screen_of(tool.form), None)
    found = gather(reader.feed(text) + reader.end()).calls
    if not found:
        return None
    return READS[client].read(found[0].name, json.loads(found[0].arguments), "call")


ONE_TOOL = [each for each in find_action_formats().values() if each.vocabulary.tool]


@pytest.mark.parametrize("form", ONE_TOOL, ids=[each.name for each in ONE_TOOL])
def test_keys_are_held_during_a_click(form: ActionFormat, client: str) -> None:
    tool, place = translator(form, client), {"coordinate": [5, 5]}
    held: Any = ["ctrl", "shift"] if form.name == "computer_use" else "ctrl+shift"
    for word in ("left_click", "right_click", "double_click"):
        assert "keys" in tool.words[word].schema(screen_of(form))["properties"]
        if word in ("right_click",) and client == "openai":
            continue
        action = called(tool, client, action=word, **place, keys=held)
        assert action is not None and action.keys == ("ctrl", "shift")
        told = tool.told(action, READS[client], screen_of(form))
        assert told == [(form.vocabulary.tool, {"action": word, **place, "keys": held})]
        without = called(tool, client, action=word, **place)
        assert without is not None and without.keys == ()


def test_a_field_that_a_client_cannot_say_is_not_offered(form: ActionFormat, client: str) -> None:
    """A browser's scroll holds no keys."""
    tool = translator(form, client)
    for name, word in tool.words.items():
        for each in word.fields:
            if word.kind == "answer" or each.required:
                continue
            needing = replace(each, required=True)
            full = replace(word, fields=tuple(needing if f is each else f for f in word.fields))
            assert CLIENTS[client].writes.can(full), (name, each)
    scroll = tool.words["scroll"].schema(screen_of(form))["properties"]
    assert ("keys" in scroll) is (form.vocabulary.tool != "" and client != "browser")


@pytest.mark.parametrize("form", ONE_TOOL, ids=[each.name for each in ONE_TOOL])
def test_a_browser_s_elements_are_clicked_by_reference(form: ActionFormat, client: str) -> None:
    tool = translator(form, client)
    assert ("click_element" in tool.words) is (client == "browser")
    if client != "browser":
        return
    for word, kind in (("click_element", "click"), ("hover_element", "move")):
        action = called(tool, client, action=word, ref="ref_7")
        assert action is not None
        assert (action.kind, action.target, action.path) == (kind, "ref_7", ())
        told = tool.told(action, READS[client], None)
        assert told == [(form.vocabulary.tool, {"action": word, "ref": "ref_7"})]
        for bad in ("", None, 7):
            assert called(tool, client, action=word, ref=bad) is None
    twice = {"target": {"type": "ref", "ref": "ref_7"}}
    action = READS[client].read("double_click", twice, "call")
    ((_, arguments),) = tool.told(action, READS[client], None)
    assert arguments == {"action": "double_click", **twice}


def test_every_pattern_holds_the_whole_text(form: ActionFormat, client: str) -> None:
    """A JSON schema's pattern would be content with a part."""
    found = list[str]()
    for word in translator(form, client).words.values():
        for schema in word.schema(screen_of(form))["properties"].values():
            found += [
                each["pattern"] for each in (schema, schema.get("items") or {}) if "pattern" in each
            ]
    assert found and all(each[0] == "^" and each[-1] == "$" for each in found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("units", [1000, 28 * 15, 28 * 49, 28 * 140])
def test_every_pixel_comes_back_where_the_model_s_units_allow(
    size: tuple[int, int], units: int
) -> None:
    for side in size:
        for axis in (Axis(side, units, units), Axis(side, units, units - 1)):
            cells: dict[int, list[int]] = {}
            for pixel in range(side):
                cells.setdefault(axis.to_model(pixel), []).append(pixel)
            assert max(cells) <= axis.last
            for unit, pixels in cells.items():
                back = axis.to_screen(unit)
                if side <= units:
                    assert pixels == [back]
                elif 0 < unit < axis.last:  # the middle of all pixels that have this unit
                    assert abs(back - (pixels[0] + pixels[-1]) / 2) <= 0.5
                assert axis.to_model(back) == unit or unit == axis.last


@pytest.mark.parametrize("size", SIZES)
def test_every_unit_is_a_pixel_of_the_screen(size: tuple[int, int]) -> None:
    screen = Screen.in_thousandths(size)
    for unit in (0, 1, 499, 500, 999, 1000, 5000):
        assert screen.holds(screen.to_screen((unit, unit)))
    assert screen.to_screen((500, 500)) == screen.middle
    assert screen.to_screen((0, 0)) == (0, 0)
    assert screen.to_screen((1000, 1000)) == (size[0] - 1, size[1] - 1)


@pytest.mark.parametrize("most", [0, 7, 10, 19, 100, 999, 1000, 1371])
def test_numbers_up_to_a_bound_are_a_pattern(most: int) -> None:
    found = re.compile(at_most(most))
    assert [n for n in range(3000) if found.fullmatch(str(n))] == [*range(most + 1)]
    assert not found.fullmatch("01") and not found.fullmatch("")


def test_keys_have_one_name_whoever_spells_them() -> None:
    for spellings in ("Return enter ENTER", "Page_Up PAGEUP pageup pgup", "super CMD win meta"):
        assert len({ours(each) for each in spellings.split()}) == 1
    assert read_chord("ctrl+shift+Escape") == ("ctrl", "shift", "esc")
    assert read_chord("ctrl +") == ("ctrl", "+") or read_chord("ctrl +")
    assert [spelt("enter", each) for each in ("openai", "x11", "pyautogui")] == [
        "ENTER",
        "Return",
        "enter",
    ]
    assert read_chord("+") == ("plus",) and read_chord("é") == ("é",)


BAD: list[tuple[ActionWords, str, dict[str, Any], str]] = [
    (OPENAI, "computer", {"type": "fly"}, "at.type"),
    (OPENAI, "computer", {"type": ["click"]}, "at.type"),
    (OPENAI, "computer", {"type": "click", "button": "left", "x": -1, "y": 0}, "at.x"),
    (OPENAI, "computer", {"type": "click", "button": "left", "x": 10**9, "y": 0}, "at.x"),
    (OPENAI, "computer", {"type": "click", "button": "left", "x": True, "y": 0}, "at.x"),
    (OPENAI, "computer", {"type": "click", "button": "left", "x": 1.5, "y": 0}, "at.x"),
    (OPENAI, "computer", {"type": "click", "x": 1, "y": 0}, "at.button"),
    (OPENAI, "computer", {"type": "drag", "path": []}, "at.path"),
    (OPENAI, "computer", {"type": "drag", "path": [{"x": 1}]}, "at.path[0].y"),
    (OPENAI, "computer", {"type": "keypress", "keys": ["a"] * 99}, "at.keys"),
    (OPENAI, "computer", {"type": "keypress", "keys": [None]}, "at.keys"),
    (OPENAI, "computer", {"type": "type", "text": None}, "at.text"),
    (OPENAI, "computer", {"type": "scroll", "x": 1, "y": 1, "scroll_x": 1e308}, "at.scroll_x"),
    (SINGLE, "computer", {"action": "left_click", "coordinate": [1, 2, 3]}, "at.coordinate"),
    (SINGLE, "computer", {"action": "scroll", "scroll_direction": "in"}, "at.scroll_direction"),
    (SINGLE, "computer", {"action": "wait", "duration": float("nan")}, "at.duration"),
    (SINGLE, "computer", {"action": "key", "text": "a" * 200_000}, "at.text"),
    (FAMILIES["browser"], "left_click", {"target": {"type": "moon"}}, "at.target"),
    (FAMILIES["browser"], "scroll", {"target": {"type": "ref", "ref": "r"}}, "at.target"),
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_fault_in_history_names_its_key(bad: Any) -> None:
    words, name, arguments, param = bad
    with pytest.raises(InvalidRequest) as found:
        words.read(name, arguments, "at")
    assert found.value.param == param


def test_answers_that_mean_no_action_are_text(form: ActionFormat) -> None:
    """Without a grammar, a model may write anything."""
    tool, screen = translator(form, "openai"), screen_of(form)
    name = form.vocabulary.tool or "click"
    for arguments in ({}, {"action": "fly"}, {"action": "left_click", "coordinate": "x"}):
        text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        reader = tool.reader(AnswerReader(None, FORMATS["hermes"], {}), screen, None)
        answer = gather([*reader.feed(text), *reader.end()])
        assert not answer.calls and name in answer.text


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    1e9,
    0.5,
    "",
    "a",
    "ctrl+c",
    "down",
    "left",
    "wheel",
    [],
    {},
    [1, 2],
)
SHAPED = (
    [0, 0, 9, 9],
    [{"x": 1, "y": 2}],
    ["CTRL", "c"],
    [""],
    {"type": "coordinate", "x": 1, "y": 2},
    {"type": "ref", "ref": "r"},
    {"type": "ref", "ref": ""},
)


def test_whatever_is_read_can_be_told(form: ActionFormat) -> None:
    """History that a client makes up is refused, or told, and never a fault of ours."""
    choose, read = random.Random(7), 0
    screen = Screen.in_thousandths((500, 400))
    for client, words in READS.items():
        tool = translator(form, client)
        for name, word in words.words.items():
            keys = word.schema(screen)["properties"]
            for _ in range(150):
                given = {key: choose.choice((*ODD, *SHAPED)) for key in keys}
                given = {key: value for key, value in given.items() if choose.random() < 0.9}
                call = (words.tool, {words.key: name, **given}) if words.tool else (name, given)
                try:
                    action = words.read(*call, "call")
                except InvalidRequest:
                    continue
                read += 1
                assert words.write(action) is not None
                assert tool.told(action, words, screen)
    assert read > 500


PLANTED = """
from saccade.plugins.computer.action_format import ActionFormat
from saccade.plugins.computer.formats.plain import FORMAT as PLAIN

FORMAT = ActionFormat(
    "planted", lambda family, _: family == "planted", 1, PLAIN.vocabulary, lambda _: True,
    PLAIN.describe,
)
"""


def test_a_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    made = find_format.find_action_format("planted", "")
    assert made.name == "planted"
    test_what_a_model_may_write_is_an_action_of_the_client_s(made, "openai")
    assert Action("wait") == made.vocabulary.read(
        *made.vocabulary.write(Action("wait")) or ("", {}), ""
    )
