from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment

from saccade.text.answer.answer_format import FORMATS
from saccade.text.answer.events import (
    AnswerEvent,
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Text,
)
from saccade.text.answer.json_call import JsonScanner
from saccade.text.answer.reader import AnswerReader, WholeAnswer, gather
from saccade.text.answer.tool_calls import ToolCalls
from tests.fixtures.families.gemma4 import CHAT_TEMPLATE

TOOLS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "where": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "deep": {"type": "boolean"},
            "options": {"$ref": "#/$defs/options"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"options": {"type": "object"}},
    },
    "stop": {"type": "object", "properties": {}},
}

HERMES = (
    'I look.\n<tool_call>\n{"name": "look", "arguments": {"where": "a \\"b\\" {"}}\n</tool_call>'
)
XML = (
    "I look.\n<tool_call>\n<function=look>\n<parameter=where>\nline 1\nline 2\n</parameter>\n"
    "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"
)

GLM = (
    "I look.\n<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>line 1\nline 2</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)

MISTRAL = 'I look.[TOOL_CALLS][{"name": "look", "arguments": {"where": "a, [b]"}}]'
LLAMA = '{"name": "look", "parameters": {"where": "a; {b}"}}'
GEMMA_CHAT = Environment().from_string(CHAT_TEMPLATE)
Q = '<|"|>'
GEMMA = f'I look.<|tool_call>call:look{{count:3,where:{Q}a "b", {{c}}\\n\n{Q}}}<tool_call|>'


def parts(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def read(form: str | None, pieces: Sequence[str], eager: bool = False, **other: Any) -> WholeAnswer:
    numbers = itertools.count()
    reader = AnswerReader(
        other.get("where"),
        FORMATS[form] if form else None,
        TOOLS,
        eager=eager,
        make_id=lambda: f"call_{next(numbers)}",
    )
    events = [event for piece in pieces for event in reader.feed(piece)]
    return gather(events + reader.end())


def calls_of(answer: WholeAnswer) -> list[tuple[str, Any]]:
    """Name and arguments; a key that stands twice is an error here."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return [
        (call.name, json.loads(call.arguments, object_pairs_hook=unique)) for call in answer.calls
    ]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", HERMES, "I look.", [("look", {"where": 'a "b" {'})]),
        ("xml", XML, "I look.", [("look", {"where": "line 1\nline 2", "count": 3})]),
        ("hermes", "no call", "no call", []),
        ("hermes", '<tool_call>{"name": "stop"}</tool_call>', "", [("stop", {})]),
        (
            "hermes",
            '<tool_call>{"name": "stop", "arguments": null}</tool_call>',
            "",
            [("stop", {})],
        ),
        (
            "hermes",
            '<tool_call>{"arguments": {"a": [1, -2.5e3, true]}, "name": "é"}</tool_call>',
            "",
            [("é", {"a": [1, -2500.0, True]})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>',
            "",
            [("a", {"x": 1})],
        ),
        (
            "hermes",
            '<tool_call>\n{"name": "a", "arguments": {"x": "</tool_call>"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>\n',
            "",
            [("a", {"x": "</tool_call>"}), ("b", {})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": "1\n\t2"}}</tool_call> and on',
            " and on",
            [("a", {"x": "1\n\t2"})],
        ),
        (
            "hermes",
            '<tool_call>\n<tool_call>{"name": "a", "arguments": {}}</tool_call>',
            "<tool_call>\n",
            [("a", {})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "a <tool_call>{"name": "b", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "a',
            [("b", {})],
        ),
        ("xml", "<tool_call><function=stop></function></tool_call>", "", [("stop", {})]),
        (
            "xml",
            "<tool_call><function=look><parameter=where></parameter><parameter=deep>True"
            "</parameter><parameter=share>2</parameter><parameter=options>{'a': 1}</parameter>"
            '<parameter=tags>\n["x", "é"]\n</parameter><parameter=note>null</parameter>'
            "<parameter=new>[1]</parameter></function></tool_call>",
            "",
            [
                (
                    "look",
                    {
                        "where": "",
                        "deep": True,
                        "share": 2,
                        "options": "{'a': 1}",
                        "tags": ["x", "é"],
                        "note": None,
                        "new": "[1]",
                    },
                )
            ],
        ),
        (
            "xml",
            "<tool_call>\n<function=look>\n<parameter=where>\n\n  </parameter> <b>\n\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [("look", {"where": "\n  </parameter> <b>\n"})],
        ),
        (
            "xml",
            "<tool_call><function=look><parameter=note>\n3\n</parameter><parameter=count>\n4.0\n"
            "</parameter></function></tool_call>",
            "",
            [("look", {"note": "3", "count": 4})],
        ),
        (
            "xml",
            "<tool_call><function=look><parameter=count>many</parameter></function></tool_call>",
            "",
            [("look", {"count": "many"})],
        ),
        ("glm", GLM, "I look.", [("look", {"where": "line 1\nline 2", "count": 3})]),
        ("glm", "<tool_call>stop</tool_call> and on", " and on", [("stop", {})]),
        (
            "glm",  # as GLM-4.5-Air has been seen to write it
            "<tool_call>look <arg_key>where</arg_key> <arg_value>backend</arg_value> </tool_call>",
            "",
            [("look", {"where": "backend"})],
        ),
        (
            "glm",
            "<tool_call>look<arg_key>where</arg_key><arg_value> a</arg_value> <b></arg_value>"
            '<arg_key>tags</arg_key><arg_value>["x", "é"]</arg_value><arg_key>deep</arg_key>'
            "<arg_value>true</arg_value></tool_call>\n<tool_call>stop\n</tool_call>",
            "",
            [
                ("look", {"where": " a</arg_value> <b>", "tags": ["x", "é"], "deep": True}),
                ("stop", {}),
            ],
        ),
        ("mistral", MISTRAL, "I look.", [("look", {"where": "a, [b]"})]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "stop", "arguments": {}}, {"arguments": {}, "name": "a"}]\nSo.',
            "\nSo.",
            [("stop", {}), ("a", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS]look[ARGS]{"where": "x", "tags": [1]}[TOOL_CALLS]stop[ARGS]{}',
            "",
            [("look", {"where": "x", "tags": [1]}), ("stop", {})],
        ),
        ("mistral", "So: [TOOL_CALLS]stop[CALL_ID]a1B2[ARGS]{}", "So:", [("stop", {})]),
        ("mistral", "[TOOL_CALLS]stop{}", "", [("stop", {})]),
        ("llama3", LLAMA, "", [("look", {"where": "a; {b}"})]),
        (
            "llama3",
            f'\n\n{LLAMA}; {{"name": "stop", "parameters": {{}}}}',
            "",
            [("look", {"where": "a; {b}"}), ("stop", {})],
        ),
        ("llama3", f"<|python_tag|>{LLAMA}", "", [("look", {"where": "a; {b}"})]),
        ("llama3", f"I look: <|python_tag|>{LLAMA}\n", "I look:", [("look", {"where": "a; {b}"})]),
        ("llama3", f"I look: {LLAMA}", f"I look: {LLAMA}", []),
        ("llama3", '{"sum": 3}', '{"sum": 3}', []),
        ("gemma", GEMMA, "I look.", [("look", {"count": 3, "where": 'a "b", {c}\\n\n'})]),
        (
            "gemma",
            f"<|tool_call>call:a-b.c{{d:[{{}},[],{Q}<{Q},-2.5e3],e:{{f:true,g:null}},"
            f"{Q}h i{Q}:None}}<tool_call|><|tool_call> call:stop{{}} <tool_call|>",
            "",
            [
                ("a-b.c", {"d": [{}, [], "<", -2500.0], "e": {"f": True, "g": None}, "h i": None}),
                ("stop", {}),
            ],
        ),
    ],
)
@pytest.mark.parametrize("eager", [False, True])
def test_calls_are_read(
    form: str, text: str, content: str, calls: list[tuple[str, Any]], eager: bool
) -> None:
    for pieces in ([text], list(text)):
        answer = read(form, pieces, eager)
        assert (answer.text, calls_of(answer)) == (content, calls)


MALFORMED = [
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "b" c}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}}</tool_ca>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}} </tool_call'),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "name": "b"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "more": 1}</tool_call>'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", "<tool_call>look at it</tool_call>"),
    ("hermes", '<tool_call>{"name": "a", "arguments": ' + '{"x": ' * 200 + "1" + "}" * 201),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 500 + "}}</tool_call>"),
    ("hermes", "a < b <tool <tool_call"),
    ("hermes", XML),
    ("xml", HERMES),
    ("xml", "<tool_call><function=></function></tool_call>"),
    ("xml", "<tool_call><function=a><parameter=x>1</parameter><parameter=x>2</parameter>"
            "</function></tool_call>"),
    ("xml", "<tool_call><function=a><parameter=x>1</function></tool_call>"),
    ("xml", "<tool_call><function=a></tool_call>"),
    ("xml", "<tool_call><function=a\nb></function></tool_call>"),
    ("glm", HERMES),
    ("glm", XML),
    ("glm", "<tool_call></tool_call>"),
    ("glm", "<tool_call>look at it</tool_call>"),
    ("glm", "<tool_call>" + "x" * 400 + "</tool_call>"),
    ("glm", "<tool_call>a<arg_key></arg_key><arg_value>1</arg_value></tool_call>"),
    ("glm", "<tool_call>a<arg_key>x</arg_key></tool_call>"),
    ("glm", "<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>x</arg_key>"
            "<arg_value>2</arg_value></tool_call>"),
    ("glm", "<tool_call>a<arg_key>x</arg_key><arg_value>1</tool_call>"),
    ("mistral", HERMES),
    ("mistral", '[TOOL_CALLS]look at it'),
    ("mistral", '[TOOL_CALLS]look at it[ARGS]{}'),
    ("mistral", '[TOOL_CALLS][ARGS]{}'),
    ("mistral", '[TOOL_CALLS]stop[ARGS]{"x": 01}'),
    ("mistral", '[TOOL_CALLS][{"name": "a", "parameters": {}}]'),
    ("mistral", '[TOOL_CALLS][]'),
    ("mistral", '[TOOL_CALLS]\n'),
    ("llama3", HERMES),
    ("llama3", MISTRAL),
    ("llama3", '<|python_tag|>brave_search.call(query="weather")'),
    ("llama3", '{"name": "a", "parameters": {"x": 1'),
    ("llama3", '\n {"name": "a", "more": 1}'),
    ("llama3", "{<|python_tag|>"),
    ("gemma", HERMES),
    ("gemma", "<|tool_call>look{}<tool_call|>"),
    ("gemma", "<|tool_call>call:{}<tool_call|>"),
    ("gemma", "<|tool_call>call:look at it{}<tool_call|>"),
    ("gemma", "<|tool_call>call:look{}<tool_call>"),
    ("gemma", "<|tool_call>call:look{where:here}<tool_call|>"),
    ("gemma", "<|tool_call>call:look{count:01}<tool_call|>"),
    ("gemma", "<|tool_call>call:look{count:1,}<tool_call|>"),
    ("gemma", "<|tool_call>call:look{count:}<tool_call|>"),
    ("gemma", "<|tool_call>call:look{:1}<tool_call|>"),
    ("gemma", "<|tool_call>call:look{tags:[1}]<tool_call|>"),
    ("gemma", "<|tool_call>call:look{tags:[1:2]}<tool_call|>"),
    ("gemma", f"<|tool_call>call:look{{where:{Q}a{Q}b}}<tool_call|>"),
    ("gemma", f"<|tool_call>call:look{{where:{Q}a{Q}{Q}b{Q}}}<tool_call|>"),
    ("gemma", f"<|tool_call>call:look{{where:{Q}a}}<tool_call|>"),
    ("gemma", "<|tool_call>call:look{a:" + "[" * 200 + "]" * 200 + "}<tool_call|>"),
    ("gemma", "<|tool_call>call:" + "x" * 500),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), MALFORMED)
@pytest.mark.parametrize("eager", [False, True])
def test_a_malformed_call_is_text_to_the_letter(form: str, text: str, eager: bool) -> None:
    for pieces in ([text], list(text)):
        assert read(form, pieces, eager) == WholeAnswer(text, "", ())


HALF = "\\ud800"


@pytest.mark.parametrize(
    ("form", "inner"),
    [
        ("hermes", f'{{"name": "look{HALF}", "arguments": {{}}}}'),
        ("hermes", f'{{"name": "look", "arguments": "{{\\"where\\": \\"{HALF}\\"}}"}}'),
    ],
)
def test_a_call_that_no_text_can_hold_is_text(form: str, inner: str) -> None:
    """Once, half of a surrogate pair that a model wrote was a 500 when the answer was told."""
    text = f"<tool_call>\n{inner}\n</tool_call>"
    assert read(form, [text], eager=True) == WholeAnswer(text, "", ())


@pytest.mark.parametrize("value", ["1e999", f'["{HALF}"]', "-1e999"])
def test_a_value_that_json_cannot_hold_is_a_string(value: str) -> None:
    name = "tags" if value.startswith("[") else "share"
    text = f"<tool_call>\n<function=look>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n"
    (call,) = read("xml", [text + "</tool_call>"]).calls
    assert json.loads(call.arguments.encode(), parse_constant=pytest.fail) == {name: value}


def test_a_call_streams_its_name_and_then_its_arguments() -> None:
    calls = ToolCalls(FORMATS["hermes"], TOOLS, eager=True, make_id=lambda: "call_x")
    events = [
        event
        for piece in ("<tool_call>", '{"name": "look", ', '"arguments": {"wh', 'ere": "x"', "}}")
        for event in calls.feed(piece)
    ]
    assert events == [
        CallStarted(0, "call_x", "look"),
        CallArguments(0, '{"wh'),
        CallArguments(0, 'ere": "x"'),
        CallArguments(0, "}"),
    ]
    assert calls.feed("</tool_call>") == [CallEnded(0)]


def test_a_string_of_the_xml_form_streams_as_it_comes() -> None:
    calls = ToolCalls(FORMATS["xml"], TOOLS, eager=True)
    calls.feed("<tool_call><function=look><parameter=where>\n")
    assert calls.feed('say "hi"') == [CallArguments(0, 'say \\"hi\\"')]
    assert calls.feed("\n</para") == []
    assert calls.feed("graph>") == [CallArguments(0, "\\n</paragraph>")]


def test_a_string_of_glm_s_form_streams_as_it_comes() -> None:
    calls = ToolCalls(FORMATS["glm"], TOOLS, eager=True)
    calls.feed("<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>")
    assert calls.feed('say "hi"') == [CallArguments(0, 'say \\"hi\\"')]
    assert calls.feed("</arg_") == []
    assert calls.feed("b>") == [CallArguments(0, "</arg_b>")]


def test_a_string_of_gemma_s_form_streams_as_it_comes() -> None:
    calls = ToolCalls(FORMATS["gemma"], TOOLS, eager=True)
    calls.feed(f"<|tool_call>call:look{{where:{Q}")
    assert calls.feed('say "hi"') == [CallArguments(0, 'say \\"hi\\"')]
    assert calls.feed("<|") == []
    assert calls.feed("b>") == [CallArguments(0, "<|b>")]
    assert calls.feed(f"{Q}}}") == [CallArguments(0, '"}')]


@pytest.mark.parametrize(
    ("form", "text", "ids"),
    [("hermes", HERMES, "call_[0-9a-f]{24}"), ("mistral", MISTRAL, "[A-Za-z0-9]{9}")],
)
def test_ids_of_calls_are_such_as_the_model_s_template_takes(
    form: str, text: str, ids: str
) -> None:
    (started,) = (
        e for e in ToolCalls(FORMATS[form], TOOLS).feed(text) if isinstance(e, CallStarted)
    )
    assert re.fullmatch(ids, started.id)


def test_nothing_is_told_of_a_call_that_may_still_break() -> None:
    calls = ToolCalls(FORMATS["hermes"], TOOLS)
    assert calls.feed('Hm. <tool_call>{"name": "look", "arguments": {"where": "x"}}') == [
        Text("Hm.")
    ]
    assert [type(event) for event in calls.feed("</tool_call>")] == [
        CallStarted,
        CallArguments,
        CallEnded,
    ]


def test_a_started_call_that_breaks_says_so_and_is_text() -> None:
    calls = ToolCalls(FORMATS["hermes"], TOOLS, eager=True, make_id=lambda: "call_x")
    text = '<tool_call>{"name": "look", "arguments": {"a": '
    assert calls.feed(text)[0] == CallStarted(0, "call_x", "look")
    assert calls.feed("oops}") == [CallBroken(0), Text(text), Text("oops}")]


def test_calls_within_reasoning_are_calls() -> None:
    text = f"Let me see.\n{HERMES}\n</think>\n\nDone.\n{HERMES}"
    answer = read("hermes", [text], where="open")
    assert answer.reasoning == "Let me see.\nI look."
    assert answer.text == "Done.\nI look."
    assert [call.id for call in answer.calls] == ["call_0", "call_1"]
    unclosed = read("hermes", [f"Let me see.\n{HERMES}"], where="open")
    assert (unclosed.text, len(unclosed.calls)) == ("", 1)


FRAGMENTS = [
    *"{}[]\":, \n\\<>/aé1-0.",
    "<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=where>",
    "<parameter=count>", "</parameter>", '"name"', '"arguments"', '{"name": "look", "arguments": ',
    '{"where": "x"}', "null", "true", "<think>", "</think>", "\n\n", "\\u00e9", "日本",
    "<arg_key>where</arg_key>", "<arg_value>", "</arg_value>", HERMES, XML, GLM,
    "[TOOL_CALLS]", "[ARGS]", "look", "<|python_tag|>", '"parameters"', "; ", MISTRAL, LLAMA,
    "<|tool_call>", "<tool_call|>", "call:look{", Q, GEMMA,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)
FORMS = st.sampled_from([*FORMATS])


@pytest.mark.more
@settings(max_examples=400, deadline=None)
@given(
    FORMS,
    TEXTS,
    st.lists(st.integers(0, 2000), max_size=12),
    st.booleans(),
    st.sampled_from([None, "open", "closed", "either"]),
)
def test_any_split_and_either_pace_give_the_same_answer(
    form: str, text: str, cuts: list[int], eager: bool, where: Any
) -> None:
    whole = read(form, [text], where=where)
    split = read(form, parts(text, cuts), eager, where=where)
    assert (split.text, split.reasoning) == (whole.text, whole.reasoning)
    assert [(c.name, c.arguments) for c in split.calls] == [
        (c.name, c.arguments) for c in whole.calls
    ]
    for call in whole.calls:
        json.loads(call.arguments)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12),
    st.lists(st.integers(0, 2000), max_size=6))  # fmt: skip
def test_what_json_dumps_writes_comes_back(text: str, value: Any, cuts: list[int]) -> None:
    arguments = {"value": value, "text": text}
    written = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=bool(cuts))
    answer = read("hermes", parts(f"<tool_call>\n{written}\n</tool_call>", cuts))
    assert calls_of(answer) == [("f", arguments)]
    assert answer.text == ""


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.booleans() | st.integers() | st.text(alphabet='a<|">\\n{}[],: é', max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abc"), inner),
        max_leaves=12,
    ),
    st.lists(st.integers(0, 2000), max_size=6),
)
def test_what_gemma_4_s_template_writes_comes_back(value: Any, cuts: list[int]) -> None:
    call = {"function": {"name": "f", "arguments": {"value": value}}}
    chat = GEMMA_CHAT.render(
        messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    answer = read("gemma", parts(chat.removeprefix("<bos><|turn>model\n"), cuts))
    if Q not in json.dumps(value, ensure_ascii=False).replace(chr(92), ""):
        assert calls_of(answer) == [("f", {"value": value})]
        assert answer.text == ""


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_a_document_is_read_as_json_reads_it(text: str) -> None:
    """Strict JSON objects are taken; what the scanner takes, once written out, is JSON."""
    for document in (text, "{" + text + "}", json.dumps({"x": text})):
        scanner, written = JsonScanner(), list[str]()
        for character in document:
            piece = None if scanner.done else scanner.feed(character)
            if piece is None:
                break
            written.append(piece)
        taken = scanner.done and len(written) == len(document)
        if taken:
            json.loads("".join(written))
        elif document.startswith(("{", "[", '"')):
            with pytest.raises(ValueError):
                json.loads(document.strip(), parse_constant=lambda _: 1 / 0)


def mutated(choose: random.Random, text: str) -> str:
    """`text` with some of it dropped, doubled, moved or replaced."""
    for _ in range(choose.randint(1, 4)):
        a, b = sorted(choose.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + choose.choice((1, 3, 40)))
        middle = choose.choice(("", text[a:b] * 2, choose.choice(FRAGMENTS), text[a:b][::-1]))
        text = text[:a] + middle + text[b:]
    return text


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_outputs_crash_nothing_and_lose_nothing(count: int) -> None:
    choose = random.Random(7)
    samples: dict[str, str] = {
        "hermes": f"{HERMES}\n{HERMES} so",
        "xml": f"{XML}\n{XML} so",
        "glm": f"{GLM}\n{GLM} so",
    }
    read_calls = 0
    for number in range(count):
        form = choose.choice([*samples])
        text = mutated(choose, samples[form])
        pieces = parts(text, [choose.randrange(400) for _ in range(3)])
        calls = ToolCalls(FORMATS[form], TOOLS, eager=bool(number % 2))
        events: list[AnswerEvent] = [e for piece in pieces for e in calls.feed(piece)]
        events += calls.end()
        answer = gather(events)
        read_calls += len(answer.calls)
        for call in answer.calls:
            assert isinstance(json.loads(call.arguments), dict)
        check_accounts(form, text, events)
    assert count // 2 < read_calls < 2 * count


def check_accounts(form: str, text: str, events: Sequence[AnswerEvent]) -> None:
    """`text` is what was told as text, with the calls between, each of which reads as itself."""
    told = [""]
    for event in events:
        if isinstance(event, CallEnded):
            told.append("")
        elif isinstance(event, Text):
            told[-1] += event.text
    call = r"\s*(<tool_call>.*?</tool_call>)\s*"
    found = re.fullmatch(call.join(map(re.escape, told)), text, re.DOTALL)
    assert found is not None, text
    calls = gather(events).calls
    for raw, expected in zip(found.groups(), calls, strict=True):
        (alone,) = read(form, [raw]).calls
        assert (alone.name, alone.arguments) == (expected.name, expected.arguments)
