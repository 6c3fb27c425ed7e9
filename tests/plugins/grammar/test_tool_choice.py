from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from saccade.core.errors import InvalidRequest
from saccade.front.members import read_tools
from saccade.plugins.grammar.grammars import Grammars
from saccade.plugins.grammar.matchers import Matchers
from saccade.plugins.grammar.tool_choice import read_tool_choice
from saccade.plugins.grammar.vocabulary import read_lexicon
from saccade.text.answer.answer_format import FORMATS
from saccade.text.answer.reader import AnswerReader, gather
from saccade.text.grammar.constraint import OutputConstraint
from saccade.text.grammar.tools import Tool
from tests.fixtures.schemas import SchemaMaker
from tests.text.lexicons import (
    DEMO,
    DEMO_ENDS,
    DEMO_VOCAB,
    LARGE_ENDS,
    LARGE_VOCAB,
    demo_lexicon,
    large_lexicon,
)
from tests.text.walks import takes, walk

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"type": "string"},
        "how": {"enum": ["near", "far"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "box": {"$ref": "#/$defs/box"},
    },
    "required": ["where", "count"],
    "additionalProperties": False,
    "$defs": {"box": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
}


def offered(strict: bool = False, **schemas: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in schemas.items()
    ]


TOOLS = read_tools(offered(look=LOOK, stop=None))
STYLE = FORMATS["hermes"].syntax.grammar(demo_lexicon())
NAMED = {"type": "function", "function": {"name": "stop"}}


def constraint(
    choice: Any, form: str, parallel: bool = True, tools: Any = TOOLS
) -> OutputConstraint:
    made = read_tool_choice(choice, tools, FORMATS[form].syntax.grammar(demo_lexicon()), parallel)
    assert made is not None
    return made


HERMES_LOOK = (
    '<tool_call>\n{"name": "look", "arguments": {"where": "</b>", "count": 3}}\n</tool_call>'
)
HERMES_STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
XML_LOOK = (
    "<tool_call>\n<function=look>\n<parameter=where>\nhere\nor there\n</parameter>\n"
    "<parameter=how>\nfar\n</parameter>\n<parameter=count>\n12\n</parameter>\n"
    "<parameter=box>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
)
XML_STOP = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
GLM_LOOK = (
    "<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>here\nor there</arg_value>\n"
    "<arg_key>how</arg_key>\n<arg_value>far</arg_value>\n<arg_key>count</arg_key>\n"
    "<arg_value>12</arg_value>\n<arg_key>box</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>"
)
GLM_STOP = "<tool_call>stop\n</tool_call>"
MISTRAL_LOOK = '{"name": "look", "arguments": {"where": "</b>", "count": 3}}'
MISTRAL_STOP = '{"name": "stop", "arguments": {}}'
LLAMA_LOOK, LLAMA_STOP = (
    call.replace('"arguments"', '"parameters"') for call in (MISTRAL_LOOK, MISTRAL_STOP)
)
GEMMA_LOOK = (
    '<|tool_call>call:look{box:[1,2],count:12,how:<|"|>far<|"|>,where:<|"|>a "b", {c}\n<|"|>}'
    "<tool_call|>"
)
GEMMA_STOP = "<|tool_call>call:stop{}<tool_call|>"
FORMS = [*FORMATS]
WRITTEN = pytest.mark.parametrize(
    ("form", "look", "stop"),
    [
        ("hermes", HERMES_LOOK, HERMES_STOP),
        ("xml", XML_LOOK, XML_STOP),
        ("glm", GLM_LOOK, GLM_STOP),
        ("mistral", MISTRAL_LOOK, MISTRAL_STOP),
        ("llama3", LLAMA_LOOK, LLAMA_STOP),
        ("gemma", GEMMA_LOOK, GEMMA_STOP),
    ],
)


def row(form: str, *calls: str) -> str:
    if form == "mistral":
        return f"[TOOL_CALLS][{', '.join(calls)}]"
    between = {"llama3": "; ", "gemma": ""}
    return between.get(form, "\n").join(calls)


@WRITTEN
def test_a_choice_allows_the_calls_that_it_names(
    grammars: Grammars, matchers: Matchers, form: str, look: str, stop: str
) -> None:
    required = grammars.compile(constraint("required", form)).text
    assert takes(matchers, required, row(form, look))
    assert takes(matchers, required, row(form, look, stop, look))
    assert not takes(matchers, required, f"Well: {row(form, look)}")
    assert not takes(matchers, required, row(form, look.replace("count", "number")))
    assert not takes(matchers, required, "")
    single = grammars.compile(constraint("required", form, parallel=False)).text
    assert takes(matchers, single, row(form, look))
    assert not takes(matchers, single, row(form, look, stop))
    named = grammars.compile(constraint(NAMED, form)).text
    assert takes(matchers, named, row(form, stop))
    assert not takes(matchers, named, row(form, look))
    assert not takes(matchers, named, row(form, stop, stop))


@WRITTEN
def test_strict_tools_leave_text_free_and_hold_what_begins_as_a_call(
    grammars: Grammars, matchers: Matchers, form: str, look: str, stop: str
) -> None:
    tools = read_tools(offered(strict=True, look=LOOK, stop=None))
    auto = grammars.compile(constraint("auto", form, tools=tools)).text
    assert takes(matchers, auto, "")
    assert takes(matchers, auto, "Nothing to call, <tool, a < b.")
    calls, wrong = row(form, look, stop), row(form, look.replace("count", "number"))
    before = "" if form == "llama3" else "I look.\n"  # Llama's begin the answer
    after = "" if form in ("mistral", "llama3") else "\nDone."  # and these end it
    assert takes(matchers, auto, f"{before}{calls}{after}")
    assert not takes(matchers, auto, f"{before}{wrong}")
    assert not takes(matchers, auto, f"{FORMATS[form].opens}\nlooks")


def test_a_free_choice_needs_no_grammar() -> None:
    assert read_tool_choice(None, TOOLS, STYLE) is None
    assert read_tool_choice("auto", TOOLS, STYLE) is None
    assert read_tool_choice("none", read_tools(offered(strict=True, a=None)), STYLE) is None


@pytest.mark.parametrize("need", ["required", "auto"])
def test_a_tag_that_is_a_token_stands_as_that_token(need: str) -> None:
    lexicon = large_lexicon()
    style = FORMATS["hermes"].syntax.grammar(lexicon)
    tools = read_tools(offered(strict=True, look=LOOK))
    made = read_tool_choice(need, tools, style)
    assert made is not None
    grammar = Grammars(lexicon, LARGE_VOCAB).compile(made, thinks_until="</think>").text
    matcher = Matchers(lexicon, LARGE_VOCAB, LARGE_ENDS).new_matcher(grammar)
    text = f"Hm.</think>\n\n{HERMES_LOOK}"
    tokens = lexicon.tokenize_str(text, parse_special=True)
    assert {151_645, 151_646, 151_648} < set(tokens)
    assert matcher.count_allowed(tokens) == len(tokens)
    matcher.accept(tokens)
    assert matcher.may_end
    if need == "required":
        matcher.rollback(len(lexicon.tokenize_str(HERMES_LOOK)))
        forced = lexicon.decode_str(list(matcher.forced()))
        assert forced.startswith('<tool_call>\n{"name": "look", "arguments": {"where": ')


def test_mistral_s_later_tokenizers_have_a_tag_before_arguments() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO))
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    vocab = tokenizer.get_vocab_size()
    lexicon = read_lexicon(tokenizer.to_str(), vocab, DEMO_ENDS)
    matchers = Matchers(lexicon, vocab, DEMO_ENDS)
    style = FORMATS["mistral"].syntax.grammar(lexicon)

    def takes_call(choice: str, text: str, strict: bool = False) -> bool:
        tools = read_tools(offered(strict, look=LOOK, stop=None))
        made = read_tool_choice(choice, tools, style)
        assert made is not None
        matcher = matchers.new_matcher(Grammars(lexicon, vocab).compile(made).text)
        tokens = lexicon.tokenize_str(text, parse_special=True)
        if matcher.count_allowed(tokens) < len(tokens):
            return False
        matcher.accept(tokens)
        return matcher.may_end

    look = '[TOOL_CALLS]look[ARGS]{"where": "a", "count": 3}'
    stop = "[TOOL_CALLS]stop[ARGS]{}"
    assert takes_call("required", look) and takes_call("required", look + stop)
    assert not takes_call("required", "well") and not takes_call("required", "[TOOL_CALLS][{}]")
    assert takes_call("auto", f"I look.{look}{stop}", strict=True)
    assert takes_call("auto", "I do not.", strict=True)
    assert not takes_call("auto", look.replace("count", "number"), strict=True)


SHAPES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "Zoom": {"type": ["number", "null"], "minimum": 0, "maximum": 4},
        "at": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "node": {"$ref": "#/$defs/node"},
        "mode": {"enum": ["a", 1, None, [2, {"b": "c"}]]},
        "how": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
        "free": {},
    },
    "required": ["node", "at"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "inner": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name"],
        }
    },
}
NODE = 'node:{name:<|"|>n<|"|>}'


def gemma_lexicon() -> tuple[LLTokenizer, int]:
    tokenizer = Tokenizer.from_file(str(DEMO))
    tokenizer.add_special_tokens(["<|tool_call>", "<tool_call|>", '<|"|>'])
    vocab = tokenizer.get_vocab_size()
    return read_lexicon(tokenizer.to_str(), vocab, DEMO_ENDS), vocab


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        (f"at:[1,2],{NODE}", True),
        (f'at:[1,2],free:{{x:[<|"|>y<|"|>,null]}},how:true,mode:1,{NODE},Zoom:2.5', True),
        (f'at:[1,2],how:<|"|>a "b"<|"|>,mode:[2,{{b:<|"|>c<|"|>}}],{NODE},Zoom:null', True),
        ('at:[1,2],node:{inner:[{inner:[],name:<|"|><|"|>}],name:<|"|>n<|"|>}', True),
        (NODE, False),
        (f"at:[1],{NODE}", False),
        (f"at:[1,2,3],{NODE}", False),
        (f"at:[1,2],{NODE},Zoom:5", False),
        (f"at:[1,2],how:3,{NODE}", False),
        (f"at:[1,2],mode:2,{NODE}", False),
        (f"at:[1,2],{NODE},more:1", False),
        ("at:[1,2],node:{inner:[]}", False),
        (f"at:[1,2],{NODE},", False),
    ],
)
def test_gemma_s_spelling_keeps_to_the_form_of_a_schema(
    arguments: str, fits: bool, special: bool
) -> None:
    assert gemma_takes(SHAPES, arguments, special) == fits
    assert gemma_reads(arguments) is not None or not fits


def gemma_takes(schema: dict[str, Any], arguments: str, special: bool = True) -> bool:
    """Whether the grammar of a call of `schema` allows these and nothing more."""
    lexicon, vocab = gemma_lexicon() if special else (demo_lexicon(), DEMO_VOCAB)
    made = read_tool_choice(
        "required", read_tools(offered(f=schema)), FORMATS["gemma"].syntax.grammar(lexicon)
    )
    assert made is not None
    matcher = Matchers(lexicon, vocab, DEMO_ENDS).new_matcher(
        Grammars(lexicon, vocab).compile(made).text
    )
    text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
    tokens = lexicon.tokenize_str(text, parse_special=special)
    if matcher.count_allowed(tokens) < len(tokens):
        return False
    matcher.accept(tokens)
    return matcher.may_end


def gemma_reads(arguments: str) -> Any:
    text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
    calls = gather(AnswerReader(None, FORMATS["gemma"], {}).feed(text)).calls
    return json.loads(calls[0].arguments) if calls else None


PLACE = "tools[0].function.parameters.properties"


@pytest.mark.parametrize(
    ("property_schema", "place"),
    [
        ({"properties": {"b:c": {}}}, f"{PLACE}.a.properties.b:c"),
        ({"type": "object", "required": ["<x>"]}, f"{PLACE}.a.properties.<x>"),
        ({"properties": {"x" * 401: {}}}, f"{PLACE}.a.properties.{'x' * 401}"),
        ({"const": 'a<|"|>b'}, f"{PLACE}.a"),
        ({"enum": ["a", [{"b": '<|"|>'}]]}, f"{PLACE}.a"),
        ({"enum": ["a", {"b": {"c:d": 1}}]}, f"{PLACE}.a"),
        ({"anyOf": [{}, {"const": {"": 1}}]}, f"{PLACE}.a.anyOf[1]"),
    ],
)
def test_what_gemma_would_not_read_back_is_refused_by_its_place(
    property_schema: Any, place: str
) -> None:
    schema = {"type": "object", "properties": {"a": property_schema}}
    with pytest.raises(InvalidRequest, match="the model cannot write") as caught:
        constraint("required", "gemma", tools=read_tools(offered(f=schema)))
    assert caught.value.param == place


@pytest.mark.parametrize("text", ["", "\x7f", "\x00\x1f\x80", '"\\\n', "<|", "\u2028é"])
def test_constants_of_any_characters_come_back_from_gemma(text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": {"b": [text]}}}, "required": ["a"]}
    arguments = f'a:{{b:[<|"|>{text}<|"|>]}}'
    assert gemma_takes(schema, arguments)
    assert gemma_reads(arguments) == {"a": {"b": [text]}}


def test_gemma_writes_nothing_into_an_object_that_is_closed() -> None:
    more: list[dict[str, Any]] = [{}, {"properties": {}}]
    for inner in more:
        closed = {"type": "object", "additionalProperties": False, **inner}
        assert gemma_takes(closed, "") and not gemma_takes(closed, "a:1")
    assert gemma_takes({"type": "object"}, "") and gemma_takes({"type": "object"}, "a:1")


def test_gemma_writes_what_is_required_and_not_described() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["a"]}
    assert gemma_takes(schema, "a:[1]") and gemma_takes(schema, "a:1,b:null")
    assert not gemma_takes(schema, "b:null") and not gemma_takes(schema, "")


def test_calls_of_generated_tools_are_read_back(grammars: Grammars, matchers: Matchers) -> None:
    maker, ended = SchemaMaker(11), 0
    for seed in range(40):
        schema = maker.schema()
        if schema.get("type") != "object":
            continue
        try:
            tools = read_tools(offered(made=schema))
            grammar = grammars.compile(constraint("required", "hermes", False, tools)).text
        except InvalidRequest as refusal:
            assert str(refusal.param).startswith("tools[0].function.parameters")
            continue
        text = walk(matchers, demo_lexicon(), grammar, seed, DEMO_ENDS)
        if text is not None:
            reader = AnswerReader(None, FORMATS["hermes"], {"made": schema})
            (call,) = gather(reader.feed(text) + reader.end()).calls
            jsonschema.validate(json.loads(call.arguments), schema)
            ended += 1
    assert ended > 10


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "web_search"}], "auto", "tools[0].type"),
        ([{"type": "function", "function": {"name": "a b"}}], "auto", "tools[0].function.name"),
        (offered(a={}) + offered(a={}), "auto", "tools[1].function.name"),
        (offered(**dict[str, Any]((f"t{i}", None) for i in range(129))), "auto", "tools"),
        ([], "required", "tool_choice"),
        (offered(a={}), {"type": "function", "function": {"name": "b"}}, "tool_choice"),
        (offered(a={}), "any", "tool_choice"),
        (offered(a={"properties": {"x": {"not": {}}}}), "required",
         "tools[0].function.parameters.properties.x.not"),
        (offered(b={}, a={"properties": {"x": {"items": {"pattern": "("}}}}), "required",
         "tools[1].function.parameters.properties.x.items"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_held_is_refused_by_field(
    grammars: Grammars, tools: Any, choice: Any, param: str, form: str
) -> None:
    if form == "gemma" and "pattern" in str(tools):
        param = ""  # of strings, Gemma's spelling holds the values alone
    with pytest.raises(InvalidRequest) if param else nullcontext() as refused:
        read: tuple[Tool, ...] = read_tools(tools)
        made = read_tool_choice(choice, read, FORMATS[form].syntax.grammar(demo_lexicon()))
        assert made is not None
        grammars.compile(made)
    assert refused is None or refused.value.param == param


def test_values_that_refer_to_others_do_not_make_a_grammar_of_any_size() -> None:
    """In the XML form each has all that it refers to in a schema of its own."""
    shared = {"$ref": "#/$defs/a"}
    schema = {
        "type": "object",
        "properties": {f"p{i}": shared for i in range(900)},
        "$defs": {"a": {"type": "integer", "description": "y" * 60_000}},
    }
    tools = read_tools(offered(made=schema))
    with pytest.raises(InvalidRequest, match="too large for a grammar") as caught:
        read_tool_choice("required", tools, FORMATS["xml"].syntax.grammar(demo_lexicon()))
    assert caught.value.param == "tool_choice"
    assert read_tool_choice("required", tools, STYLE) is not None


@WRITTEN
def test_an_answer_is_a_call_or_what_else_is_asked_for(
    grammars: Grammars, matchers: Matchers, form: str, look: str, stop: str
) -> None:
    properties = {"name": {"type": "string"}, "sum": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["sum"]}
    answer = OutputConstraint("json", schema, "response_format")
    style = FORMATS[form].syntax.grammar(demo_lexicon())
    made = read_tool_choice("auto", TOOLS, style, True, answer)
    assert made is not None
    grammar = grammars.compile(made).text
    assert takes(matchers, grammar, '{"sum": 3}')
    assert takes(matchers, grammar, '{"name": "look", "sum": 3}')
    assert takes(matchers, grammar, '{"name": "stops", "sum": 3}')
    assert takes(matchers, grammar, row(form, look)) and takes(matchers, grammar, row(form, stop))
    assert not takes(matchers, grammar, "Well") and not takes(matchers, grammar, "{}")
    assert read_tool_choice("none", TOOLS, style, True, answer) is answer
    forced = read_tool_choice("required", TOOLS, style, True, answer)
    assert forced is not None
    assert not takes(matchers, grammars.compile(forced).text, '{"sum": 3}')
    regex = OutputConstraint("regex", "a", "structured_outputs.regex")
    with pytest.raises(InvalidRequest, match="only JSON output is supported"):
        read_tool_choice("auto", TOOLS, style, True, regex)
