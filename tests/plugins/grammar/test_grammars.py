from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from saccade.core.errors import InvalidRequest
from saccade.ipc.memory import allocated_bytes
from saccade.plugins.grammar.grammars import Grammars
from saccade.plugins.grammar.matchers import Matchers
from saccade.plugins.grammar.schema import MAX_NESTING
from saccade.text.grammar.constraint import (
    FREE,
    OutputConstraint,
    read_guided,
    read_response_format,
    read_structured_outputs,
)
from saccade.text.grammar.schema_types import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from tests.fixtures.schemas import SchemaMaker
from tests.text.lexicons import DEMO_ENDS, DEMO_VOCAB, demo_lexicon
from tests.text.walks import takes, walk

SCHEMA = "response_format.json_schema.schema"


def format_of(schema: Any) -> OutputConstraint:
    constraint = read_response_format(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    )
    assert constraint is not None
    return constraint


def test_any_text_needs_no_grammar() -> None:
    assert read_response_format(None) is None
    assert read_response_format({"type": "text"}) is None
    assert read_guided({"guided_json": None}) is None
    assert read_structured_outputs({"json_object": False}, "structured_outputs") is None


@pytest.mark.parametrize(
    ("constraint", "whole", "wrong"),
    [
        (read_response_format({"type": "json_object"}), '{"a": [1, {"b": null}]}', "[1]"),
        (format_of({"type": "array", "items": {"type": "integer"}}), "[1, 2]", "[1, 2.5]"),
        (read_guided({"guided_regex": r"a/b\d+\n?"}), "a/b12\n", "a/b"),
        (read_guided({"guided_regex": r"^yes|no$"}), "no", "yes or no"),
        (read_guided({"guided_choice": ['a "b"\n', "é", "é"]}), 'a "b"\n', 'a "b"'),
        (read_guided({"guided_choice": ["a\x7fb"]}), "a\x7fb", "ab"),
        (read_guided({"guided_grammar": 'start: "x" start?'}), "xxx", "xy"),
        (read_guided({"guided_json": '{"enum": ["a", 1]}'}), '"a"', "a"),
        (
            read_structured_outputs(
                {"json": {"type": "array"}, "disable_any_whitespace": True}, "s"
            ),
            "[1,2]",
            "[1, 2]",
        ),
        (
            read_structured_outputs({"json": {}, "disable_any_whitespace": False}, "s"),
            "[1,\n  2 ]",
            "[1," + 50 * " " + "2]",
        ),
        (
            read_structured_outputs({"json": {}, "whitespace_pattern": "[ ]?"}, "s"),
            "[1, 2 ]",
            "[1,  2]",
        ),
    ],
)
def test_a_constraint_allows_what_it_says(
    grammars: Grammars, matchers: Matchers, constraint: OutputConstraint, whole: str, wrong: str
) -> None:
    grammar = grammars.compile(constraint).text
    assert takes(matchers, grammar, whole)
    assert not takes(matchers, grammar, wrong)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"x": {"patternProperties": {}}}}, ".properties.x.patternProperties"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, ".anyOf[1].not"),
        ({"items": {"if": {}}}, ".items.if"),
        ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
        ({"properties": {"x": {"type": "strin"}}}, ".properties.x.type"),
        ({"properties": {"x": 3}}, ".properties.x"),
        ({"properties": {"x": {"minimum": "3"}}}, ".properties.x.minimum"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ".exclusiveMinimum"),
        ({"required": "x"}, ".required"),
        ({"enum": []}, ".enum"),
        ({"anyOf": {}}, ".anyOf"),
        ({"properties": {"x": {"pattern": "(?=a)"}}}, ".properties.x"),
        ({"properties": {"x": {"$ref": "#/$defs/y"}}}, ".properties.x.$ref"),
        ({"properties": {"x": {"$ref": "http://other/"}}}, ".properties.x.$ref"),
        ({"$defs": {"a": {"pattern": "["}}, "$ref": "#/$defs/a"}, ".$defs.a"),
        ({"type": "array", "minItems": 1, "items": {"minimum": 5, "maximum": 3, "type": "integer"}},
         ".items"),
        ({"properties": {"x": {"multipleOf": 1_000_003}}}, ".properties.x.multipleOf"),
        ({"multipleOf": 0}, ".multipleOf"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, ""),
        ({"properties": {"x": {"oneOf": [{"type": "object", "additionalProperties": False},
                                         {"type": "object"}]}}}, ".properties.x"),
        ({"properties": {"x": {"anyOf": [{"type": "integer", "minimum": 2, "maximum": 1},
                                         {"pattern": "["}]}}}, ".properties.x.anyOf[1]"),
        ({"$ref": "#"}, ""),
        ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, ""),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, ""),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}],
          "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, ".anyOf[1]"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, ".properties"),
        ({"enum": list(range(5001))}, ".enum"),
        ({"description": "x" * MAX_SCHEMA_BYTES}, ""),
        ({"x": float("nan")}, ""),
        ({"const": object()}, ""),
        ({"x-guidance": {"lenient": True}}, ".x-guidance"),
    ],
)  # fmt: skip
def test_what_no_grammar_holds_is_refused_by_its_place(
    grammars: Grammars, schema: Any, place: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(format_of(schema))
    assert refused.value.param == SCHEMA + place
    assert refused.value.message.startswith(SCHEMA + place)


def test_a_schema_nested_too_deeply_is_refused(grammars: Grammars) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(MAX_SCHEMA_DEPTH):
        schema = {"type": "array", "items": schema}
    grammars.compile(format_of(schema))
    with pytest.raises(InvalidRequest, match="65 deep"):
        grammars.compile(format_of({"type": "array", "items": schema}))
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest):
        grammars.compile(format_of(schema))
    value: Any = 1
    for _ in range(MAX_NESTING):
        value = [value]
    for schema in ({"const": [value]}, {"type": "object", "unknown": {"a": value}}):
        with pytest.raises(InvalidRequest, match=f"nested over {MAX_NESTING} deep"):
            grammars.compile(format_of(schema))


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
         "response_format.json_schema.name"),
    ],
)  # fmt: skip
def test_a_malformed_response_format_is_refused_by_field(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_response_format(value)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "s"),
        ({"json": {}, "regex": "a"}, "s"),
        ({"json": "{"}, "s.json"),
        ({"regex": 3}, "s.regex"),
        ({"regex": "["}, "s.regex"),
        ({"regex": "a" * 70_000}, "s.regex"),
        ({"choice": []}, "s.choice"),
        ({"choice": ["a", 1]}, "s.choice"),
        ({"grammar": "root ::= a"}, "s.grammar"),
        ({"grammar": "start: %json {}"}, "s.grammar"),
        ({"grammar": "begin: /a/"}, "s.grammar"),
        ({"json_object": "yes"}, "s.json_object"),
    ],
)
def test_a_malformed_structured_output_is_refused_by_field(
    grammars: Grammars, value: Any, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        constraint = read_structured_outputs(value, "s")
        assert constraint is not None
        grammars.compile(constraint)
    assert refused.value.param == param


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    one = grammars.compile(format_of({"type": "object", "properties": {"a": {}, "b": {}}}))
    again = grammars.compile(format_of({"type": "object", "properties": {"a": {}, "b": {}}}))
    other = grammars.compile(format_of({"type": "object", "properties": {"b": {}, "a": {}}}))
    assert one is again
    assert one.digest != other.digest, "the order of properties is the order of the answer"


def test_only_so_many_grammars_are_kept() -> None:
    few = Grammars(demo_lexicon(), DEMO_VOCAB, most=2)
    first = few.compile(format_of({"const": 0}))
    for value in (1, 2):
        few.compile(format_of({"const": value}))
    assert few.compile(format_of({"const": 0})) is not first


def test_reasoning_before_the_answer_is_free(grammars: Grammars, matchers: Matchers) -> None:
    grammar = grammars.compile(format_of({"enum": [True]}), thinks_until="</think>").text
    assert takes(matchers, grammar, "Is it < or {?\n</think>\n\ntrue")
    assert not takes(matchers, grammar, "true")
    assert not takes(matchers, grammar, "</think>\n\nfalse")


def test_branches_that_exclude_each_other_are_told_apart(
    grammars: Grammars, matchers: Matchers
) -> None:
    branches = [
        {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in (1, 2)
    ]
    grammar = grammars.compile(format_of({"oneOf": [*branches, {"type": "null"}]})).text
    assert takes(matchers, grammar, '{"k": 2}')
    assert takes(matchers, grammar, "null")
    same = {**branches[0], "properties": {"k": {"const": 1.0}}}
    with pytest.raises(InvalidRequest, match="oneOf"):
        grammars.compile(format_of({"oneOf": [branches[0], same]}))


@pytest.mark.parametrize(
    ("schema", "value", "taken"),
    [
        ({"type": "object", "properties": {"x": {"type": "integer"}}}, {"x": 1}, True),
        ({"type": "object", "properties": {"x": {"type": "integer"}}}, {"y": 1}, False),
        ({"type": "object", "properties": {}}, {"y": 1}, False),
        ({"type": "object"}, {"y": 1}, True),
        ({"type": "object", "properties": {}, "additionalProperties": True}, {"y": 1}, True),
        ({"type": "object", "properties": {}, "required": ["y"]}, {"y": 1}, True),
        ({"type": "object", "properties": {}, "minProperties": 1}, {"y": 1}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {}}}}, {"y": 1},
         False),
        ({"allOf": [{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]},
                    {"type": "object", "properties": {"y": {"const": 1}}, "required": ["y"]}]},
         {"x": 1, "y": 1}, True),
    ],
)  # fmt: skip
def test_properties_are_those_that_are_named_unless_the_schema_says_otherwise(
    grammars: Grammars, matchers: Matchers, schema: Any, value: Any, taken: bool
) -> None:
    jsonschema.validate(value, schema)
    grammar = grammars.compile(format_of(schema)).text
    assert takes(matchers, grammar, json.dumps(value)) is taken


def check_schemas(grammars: Grammars, matchers: Matchers, count: int, seed: int) -> None:
    """Each schema is compiled or refused at a place; its answers, drawn and jumped to, fit it."""
    maker = SchemaMaker(seed)
    compiled = ended = 0
    for number in range(count):
        schema = maker.schema()
        constraint = format_of(schema)
        if number % 3 == 0:
            constraint = OutputConstraint("json", schema, SCHEMA, FREE)
        try:
            grammar = grammars.compile(constraint).text
        except InvalidRequest as refusal:
            assert refusal.param is not None and refusal.param.startswith(SCHEMA)
            continue
        compiled += 1
        text = walk(matchers, demo_lexicon(), grammar, number, DEMO_ENDS, jump=bool(number % 2))
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert compiled > count // 2
    assert ended > 0.95 * compiled


@pytest.mark.more
def test_answers_to_100_schemas_fit_them(grammars: Grammars, matchers: Matchers) -> None:
    check_schemas(grammars, matchers, 100, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_to_1000_schemas_fit_them(grammars: Grammars, matchers: Matchers) -> None:
    check_schemas(grammars, matchers, 1000, seed=2)


@pytest.mark.parametrize("pattern", ["((a{1000}){1000})", "x((b{1000}){1000}){1000}"])
def test_a_pattern_that_expands_without_measure_is_refused_and_nothing_is_kept(
    pattern: str,
) -> None:
    """It once took 2.5 s and 165 MB, in front and engine, and stayed."""
    grammars, before = Grammars(demo_lexicon(), DEMO_VOCAB), allocated_bytes()
    for _ in range(3):
        with pytest.raises(InvalidRequest) as refused:
            grammars.compile(OutputConstraint("regex", pattern, "guided_regex"))
        assert refused.value.param == "guided_regex"
    assert grammars.nbytes == 0
    assert allocated_bytes() - before < 30 << 20
