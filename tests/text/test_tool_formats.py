"""The contract of tool formats, over every one that is found: what its grammar allows is what its
reader reads back, however the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

import saccade
from saccade.core.options import ReasoningParser
from saccade.front.members import read_tools
from saccade.plugin import Plugin, Requests
from saccade.plugins import plugins
from saccade.plugins.grammar.grammars import Grammars
from saccade.plugins.grammar.matchers import Matchers
from saccade.plugins.grammar.tool_choice import read_tool_choice
from saccade.text.answer import answer_format
from saccade.text.answer.answer_format import CALL_TAGS, FORMATS, THOUGHTS, find_answer_format
from saccade.text.answer.reader import AnswerReader, WholeAnswer, gather
from saccade.text.answer.tool_format import ToolFormat
from tests.text.lexicons import DEMO_ENDS, DEMO_VOCAB, demo_lexicon
from tests.text.walks import takes, walk

PACKAGE = Path(saccade.__file__).parent
BOX = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"enum": ["a</b>", "é\n"]},
        "how": {"enum": ["near", "far"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "box": {"$ref": "#/$defs/box"},
    },
    "required": ["where", "count"],
    "additionalProperties": False,
    "$defs": {"box": BOX},
}
SCHEMAS: dict[str, Any] = {"look": LOOK, "stop": {"type": "object", "properties": {}}}
LOOKS = {"type": "function", "function": {"name": "look"}}
ONE_OF: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"a": ""},
    {"a": "b\nc\n", "d": 'é "f" \\ {g: [h], i}'},
    {"a": " x ", "b": "</tool_call>", "c": "<b> & </b>", "d": "true"},
    {"a": 0, "b": -2.5, "c": 12345678901},
    {"a": True, "b": False, "c": None},
    {"a": [], "b": [1, ["x", {"c": None}]], "d": {"e": {"f": "日本"}}},
]


@pytest.fixture(params=FORMATS.values(), ids=[*FORMATS])
def form(request: pytest.FixtureRequest) -> ToolFormat:
    found: ToolFormat = request.param
    return found


@cache
def matchers() -> Matchers:
    return Matchers(demo_lexicon(), DEMO_VOCAB, DEMO_ENDS)


@cache
def grammars() -> Grammars:
    return Grammars(demo_lexicon(), DEMO_VOCAB)


def offered(schemas: dict[str, Any], strict: bool = False) -> Any:
    return read_tools(
        [
            {"type": "function", "function": {"name": name, "parameters": each, "strict": strict}}
            for name, each in schemas.items()
        ]
    )


def grammar(
    form: ToolFormat, choice: Any, tools: Any = None, parallel: bool = True, answer: Any = None
) -> str:
    tools = offered(SCHEMAS) if tools is None else tools
    made = read_tool_choice(choice, tools, form.syntax.grammar(demo_lexicon()), parallel, answer)
    assert made is not None
    return grammars().compile(made).text


def drawn(made: str, seeds: int) -> list[str]:
    """Answers as a model with random weights would write them; those that end."""
    texts = (
        walk(matchers(), demo_lexicon(), made, s, DEMO_ENDS, jump=s % 2 > 0) for s in range(seeds)
    )
    return [text for text in texts if text is not None]


def written(form: ToolFormat, arguments: dict[str, Any]) -> str:
    """A call of `act`, of which its schema leaves no choice but between JSON's escapes."""
    schema = {
        "type": "object",
        "properties": {name: {"const": value} for name, value in arguments.items()},
        "required": [*arguments],
        "additionalProperties": False,
    }
    return drawn(grammar(form, "required", offered({"act": schema}), False), 1)[0]


def read(
    form: ToolFormat, pieces: Sequence[str], schemas: dict[str, Any], eager: bool = False
) -> WholeAnswer:
    reader = AnswerReader(None, form, schemas, eager=eager, make_id=lambda: "id")
    return gather([event for piece in pieces for event in reader.feed(piece)] + reader.end())


def calls_of(answer: WholeAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def test_a_format_is_found_by_its_mark_alone(form: ToolFormat) -> None:
    assert FORMATS[form.name] is form
    assert len({each.order for each in FORMATS.values()}) == len(FORMATS)
    assert form.opens in form.tags <= CALL_TAGS
    for mark in form.marks:
        assert find_answer_format([f"x {mark} y"], "auto", "none").calls is form
    assert find_answer_format(["no mark"], form.name, "none").calls is form
    if form.thoughts is not None:
        assert form.thoughts in THOUGHTS and form.thoughts.name in get_args(ReasoningParser)
        assert find_answer_format([form.thoughts.close], "none", "auto").reasoning == form.thoughts


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_call_is_read_back_at_every_cut(form: ToolFormat, arguments: dict[str, Any]) -> None:
    text = written(form, arguments)
    schemas = {"act": {"properties": {name: {"const": each} for name, each in arguments.items()}}}
    cuts = [[text], [*text], *([text[:at], text[at:]] for at in range(1, len(text)))]
    for number, pieces in enumerate(cuts):
        answer = read(form, pieces, schemas, eager=number % 2 > 0)
        assert (answer.text, calls_of(answer)) == ("", [("act", arguments)]), pieces


def test_text_around_a_call_is_text(form: ToolFormat) -> None:
    call = written(form, {"a": "b"})
    schemas = {"act": {"properties": {"a": {"const": "b"}}}}
    for before, after in (("", " and on"), ("First:", ""), ("First:", " and on")):
        text, calls = f"{before}{call}{after}", [("act", {"a": "b"})]
        if form.bare and before:  # an object behind text is no call without its tag
            text = f"{before}{form.opens}{call}{after}"
        answer = read(form, [*text], schemas)
        assert (answer.text, calls_of(answer)) == (before + after, calls)


def test_a_call_that_is_broken_off_or_damaged_is_text(form: ToolFormat) -> None:
    text = written(form, {"a": "b", "c": [1]})
    schemas = {"act": {"properties": {"a": {"const": "b"}, "c": {"const": [1]}}}}
    whole, kept = read(form, [text], schemas), 0
    for at in range(len(text)):
        for damaged in (text[:at], text[:at] + "\x00" + text[at + 1 :]):
            answers = [
                read(form, pieces, schemas, e)
                for pieces in ([damaged], [*damaged])
                for e in (False, True)
            ]
            assert all(each == answers[0] for each in answers), damaged
            if answers[0].calls:  # what is missing says nothing, or stands within a name or a text
                assert len(answers[0].calls) == len(whole.calls) == 1
            else:
                kept += 1
                assert answers[0].text == damaged
    assert kept > len(text)


def test_a_choice_allows_the_calls_that_it_names(form: ToolFormat) -> None:
    several = [read(form, [text], SCHEMAS) for text in drawn(grammar(form, "required"), 20)]
    single = [
        read(form, [text], SCHEMAS) for text in drawn(grammar(form, "required", None, False), 8)
    ]
    named = [read(form, [text], SCHEMAS) for text in drawn(grammar(form, LOOKS), 4)]
    some = {"type": "allowed_tools", "allowed_tools": ONE_OF}
    allowed = [read(form, [text], SCHEMAS) for text in drawn(grammar(form, some), 4)]
    for answers in (several, single, named, allowed):
        assert answers and all(answer.calls and not answer.text for answer in answers)
        for name, arguments in (call for answer in answers for call in calls_of(answer)):
            jsonschema.validate(arguments, SCHEMAS[name])
    names = [[call.name for call in answer.calls] for answer in several]
    assert {name for each in names for name in each} == {*SCHEMAS}
    assert max(map(len, names)) > 1
    assert all(len(answer.calls) == 1 for answer in (*single, *named))
    assert all(answer.calls[0].name == "look" for answer in named)
    assert all(call.name == "stop" for answer in allowed for call in answer.calls)
    for text in ("", "Well.", f"{form.opens}Well."):
        assert not takes(matchers(), grammar(form, "required"), text)


def test_strict_tools_leave_text_free_and_hold_what_begins_as_a_call(form: ToolFormat) -> None:
    made = grammar(form, "auto", offered(SCHEMAS, strict=True))
    calls = drawn(grammar(form, "required", None, False), 6)
    assert all(
        takes(matchers(), made, text) for text in ("", "Nothing to call, <tool, a < b.", *calls)
    )
    assert not takes(matchers(), made, f"{form.opens}Well.")
    assert not any(
        takes(matchers(), made, call.replace("look", "lock")) for call in calls if "look" in call
    )


def test_calls_in_a_row_are_read_back_at_any_pace(form: ToolFormat) -> None:
    for text in drawn(grammar(form, "required"), 10):
        calls = calls_of(read(form, [text], SCHEMAS))
        for eager in (False, True):
            assert calls_of(read(form, [*text], SCHEMAS, eager)) == calls


def test_no_shared_file_names_a_format() -> None:
    names = re.compile(rf"[\"'`. /]({'|'.join(FORMATS)})[\"'`. ,]")
    own = {PACKAGE / "families", PACKAGE / "plugins", PACKAGE / "text/answer/formats"}
    shared = [path for path in PACKAGE.rglob("*.py") if not own & {*path.parents}]
    assert len(shared) > 300
    assert not [path for path in shared if names.search(path.read_text())]


PLANTED = """
from saccade.text.answer.formats.hermes import HermesGrammar
from saccade.text.answer.json_call import JsonCall
from saccade.text.answer.tool_format import CallSyntax, ToolFormat

SYNTAX = CallSyntax(
    lambda _: JsonCall("</do>"), lambda lexicon: HermesGrammar(lexicon, "<do>", "</do>")
)
FORMATS = (
    ToolFormat("planted", ("<do>",), 5, "<do>", frozenset({"<do>", "</do>"}), "planted_do:SYNTAX"),
)
"""


def test_a_plugin_adds_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_do.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    planted = Plugin("planted", requests=Requests(tool_formats="planted_do:FORMATS"))
    monkeypatch.setattr("saccade.plugins.plugins", lambda: (*plugins(), planted))
    monkeypatch.setattr(answer_format, "FORMATS", answer_format.find_formats())
    made = find_answer_format(["{{ '<do>' }}"], "auto", "none").calls
    assert made is not None and made.name == "planted"
    test_a_call_is_read_back_at_every_cut(made, ARGUMENTS[2])
    test_a_choice_allows_the_calls_that_it_names(made)
