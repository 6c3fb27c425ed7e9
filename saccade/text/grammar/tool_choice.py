"""A grammar for a model's tool calls, in the model's own spelling.

Owns the meaning of `tool_choice` and the text of these grammars. Knows nothing of reading calls
(`tool_calls.py`) or of matchers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLTokenizer

from saccade.core.errors import InvalidRequest
from saccade.core.grammar_vocab import tag_term
from saccade.text import call_gemma, call_glm
from saccade.text.answer.tool_calls import ARGUMENTS, CLOSE, OPEN, OPENS, Form
from saccade.text.call_xml import allowed_types
from saccade.text.gemma_rules import GemmaRules
from saccade.text.grammar.grammars import OutputConstraint, Part, lark_part, quoted, schema_part
from saccade.text.grammar.json_size import extent
from saccade.text.grammar.schema import as_root, place_name, prepare_schema
from saccade.text.grammar.tools import Tool

_MAY_BE_ANY = {"type": "object"}

_REFERENCE = '"$ref"'
_MAX_CHARACTERS = 524_288
"""Of the schemas within one grammar, which takes about a second to compile then. In the XML form
each value that refers to others has them all in a schema of its own.
"""

Need = Literal["may", "must"]


@dataclass(frozen=True, slots=True)
class Style:
    """A model's way to write calls. opening, closing: its tags in Lark; key: the tags around an
    argument's name, and those around its value, where there are such tags. arguments: the tag
    between a tool's name and its arguments, where nothing else is. quote: Gemma's, around strings.
    """

    form: Form
    opening: str
    closing: str
    key: tuple[str, str, str, str] | None = None
    arguments: str | None = None
    quote: str = ""

    @classmethod
    def of(cls, form: Form, lexicon: LLTokenizer) -> Style:
        def term(tag: str) -> str:
            return tag_term(lexicon, tag)

        key = None
        if form == "glm":
            key = (
                term(call_glm.KEY),
                term(call_glm.KEY_END),
                term(call_glm.VALUE),
                term(call_glm.VALUE_END),
            )
        arguments = term(ARGUMENTS) if form == "mistral" else None
        if arguments == quoted(ARGUMENTS):  # a tokenizer before version 11
            arguments = None
        closing = call_gemma.CLOSE if form == "gemma" else CLOSE
        quote = term(call_gemma.QUOTE) if form == "gemma" else ""
        return cls(form, term(OPENS.get(form, OPEN)), term(closing), key, arguments, quote)

    @property
    def gap(self) -> str:
        """The text between a call's tag and the call."""
        return "\n" if self.form in ("hermes", "xml") else ""

    @property
    def begun(self) -> str:
        """A call's tag and the gap, in Lark."""
        return f"{self.opening} {quoted(self.gap)}" if self.gap else self.opening


class _Parts:
    """Grammars of values, within bounds. param: the requesting field."""

    def __init__(self, param: str) -> None:
        self.made: list[Part] = []
        self._param = param
        self._characters = 0

    def add(self, part: Part) -> None:
        """Raises InvalidRequest when all are too large together."""
        self._characters += extent(part).characters
        if self._characters > _MAX_CHARACTERS:
            raise InvalidRequest(
                f"{self._param}: the schemas of these tools are too large for a grammar: "
                f"{self._characters} characters and more, with what each refers to; the limit is "
                f"{_MAX_CHARACTERS}: offer fewer tools, or none that is strict",
                self._param,
            )
        self.made.append(part)


def read_tool_choice(
    choice: Any,
    tools: Sequence[Tool],
    style: Style,
    parallel: bool = True,
    answer: OutputConstraint | None = None,
) -> OutputConstraint | None:
    """The grammar for `tool_choice`; None: the answer is free.

    "none" and "auto" leave the answer free, except for "auto" with a strict tool: then text is
    free, and a begun call has to be complete. answer: the form of an answer without calls. Raises
    InvalidRequest that names the field.
    """
    match choice:
        case None | "auto":
            if answer is not None:
                return calls_wish(tools, style, "must", parallel, "tools", answer)
            strict = any(tool.strict for tool in tools)
            return calls_wish(tools, style, "may", parallel, "tools") if strict else None
        case "none":
            return answer
        case "required":
            chosen, several = list(tools), parallel
            what = "there are no tools"
        case {"type": "function", "function": {"name": str(name)}}:
            chosen, several = [tool for tool in tools if tool.name == name], False
            what = f"no tool is named {name[:100]!r}"
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            return _allowed(mode, allowed, tools, style, parallel, answer)
        case _:
            raise InvalidRequest(
                'tool_choice: expected "none", "auto", "required" or {"type": "function", '
                '"function": {"name": ...}}',
                "tool_choice",
            )
    if not chosen:
        raise InvalidRequest(f"tool_choice: {what}", "tool_choice")
    return calls_wish(chosen, style, "must", several, "tool_choice")


def _allowed(
    mode: object,
    allowed: Sequence[Any],
    tools: Sequence[Tool],
    style: Style,
    parallel: bool,
    answer: OutputConstraint | None,
) -> OutputConstraint:
    """Calls of some of the tools alone: optional (`auto`), or `required`."""
    where = "tool_choice.allowed_tools"
    if mode not in ("auto", "required"):
        raise InvalidRequest(f'{where}.mode: expected "auto" or "required"', f"{where}.mode")
    named = {tool.name: tool for tool in tools}
    chosen: dict[str, Tool] = {}
    for index, each in enumerate(allowed):
        match each:
            case {"type": "function", "function": {"name": str(name)}} if name in named:
                chosen[name] = named[name]
            case _:
                place = f"{where}.tools[{index}]"
                raise InvalidRequest(f"{place}: no such tool is offered", place)
    if not chosen:
        raise InvalidRequest(f"{where}.tools: the list is empty", f"{where}.tools")
    several = list(chosen.values())
    if mode == "auto" and answer is None:
        return calls_wish(several, style, "may", parallel, "tool_choice")
    free = answer if mode == "auto" else None
    return calls_wish(several, style, "must", parallel, "tool_choice", free)


def calls_wish(
    tools: Sequence[Tool],
    style: Style,
    need: Need,
    parallel: bool,
    param: str,
    answer: OutputConstraint | None = None,
) -> OutputConstraint:
    """A grammar of calls of `tools`. must: one call, or with `parallel` several in a row; or else
    `answer`. may: text, in which every <tool_call> begins a call. Raises InvalidRequest that names
    the place within a tool's schema.
    """
    parts = _Parts(param)
    rules = []
    # A rule for each tool.
    for index, tool in enumerate(tools):
        schema = prepare_schema(tool.parameters, tool.param)
        if style.form in ("xml", "glm"):
            rules += _argument_rules(index, tool, schema, parts, style)
        elif style.form == "gemma":
            made = GemmaRules(f"g_{index}", schema, tool.param, style.quote)
            rules.append(f"tool_{index}: {quoted(f'call:{tool.name}')} {made.object(schema)}")
            rules += made.rules
            for part in made.parts:
                parts.add(part)
        else:
            parts.add(schema_part(f"arguments_{index}", _as_object(schema)))
            rules.append(f"tool_{index}: {_json_call(style, tool.name, f'@arguments_{index}')}")
    any_tool = " | ".join(f"tool_{index}" for index in range(len(tools)))
    start = _start(style, need, parallel, answer is not None)
    if answer is not None:
        parts.add(_answer_part(answer))
    lark = "\n".join([*start, f"called: {any_tool}", *rules]) + "\n"
    schemas = [OutputConstraint("json", tool.parameters, tool.param) for tool in tools]
    if answer is not None:
        schemas.append(answer)
    return OutputConstraint(
        "parts", [lark_part("calls", lark), *parts.made], param, inner=tuple(schemas)
    )


def _start(style: Style, need: Need, parallel: bool, answer: bool) -> list[str]:
    """Rules for the whole answer. answer: there is another than calls."""
    calls = [f"calls: {_row(style, parallel)}", f"call: {style.begun} called {style.closing}"]
    if style.form == "mistral":
        calls[1] = f"call: {style.opening} called"
    if style.form == "llama3":
        del calls[1]
    if need == "must":
        return ["start: calls | @answer" if answer else "start: calls", *calls]
    text = rf"(?s:.*){re.escape(OPENS.get(style.form, OPEN)).replace('/', chr(92) + '/')}(?s:.*)"
    if style.form == "llama3":
        return ["start: calls | AFTER", rf"AFTER: /(?s:.*)/ & ~/{text}/ & ~/\s*\{{(?s:.*)/", *calls]
    after = f"AFTER: /(?s:.*)/ & ~/{text}/"
    if style.form == "mistral":
        more = _row(style, parallel).removeprefix("call" if style.arguments else style.opening)
        begun = f"begun called {more}" if style.arguments else f"begun {more}"
        return [f"start: AFTER | {begun}", after, _begun(style), *calls[1:]]
    repeated = "*" if parallel else "?"
    return [f"start: (begun called {style.closing}){repeated} AFTER", after, _begun(style)]


def _row(style: Style, parallel: bool) -> str:
    """Calls in a row."""
    if style.form == "llama3":
        return 'called ("; " called)*' if parallel else "called"
    if style.form == "gemma":
        return "call call*" if parallel else "call"
    if style.form != "mistral":
        return 'call ("\\n" call)*' if parallel else "call"
    if style.arguments:
        return "call call*" if parallel else "call"
    more = '(", " called)* ' if parallel else ""
    return f'{style.opening} "[" called {more}"]"'


def _json_call(style: Style, name: str, arguments: str) -> str:
    """One call of those forms whose arguments are JSON."""
    if style.arguments:
        return f"{quoted(name)} {style.arguments} {arguments}"
    if style.form == "llama3":  # no tag: word by word, as another answer in JSON would begin
        words = ("{", '"name"', ": ", json.dumps(name), ", ", '"parameters"', ": ")
        return f'{" ".join(map(quoted, words))} {arguments} "}}"'
    head = f'{{"name": {json.dumps(name)}, "arguments": '
    return f"{quoted(head)} {arguments} {quoted('}' + style.gap)}"


def _answer_part(answer: OutputConstraint) -> Part:
    if answer.kind != "json":
        raise InvalidRequest(
            f"{answer.param}: beside tools that may be called, only JSON can be asked for; send "
            'tool_choice "none" or "required"',
            answer.param,
            "unsupported_parameter",
        )
    return schema_part("answer", prepare_schema(answer.value, answer.param), answer.spacing)


def _begun(style: Style) -> str:
    """The rule of text up to the first tag that opens a call."""
    tag = OPENS.get(style.form, OPEN)
    if style.opening == quoted(tag):
        return f"begun: before\nbefore[suffix={quoted(tag + style.gap)}]: /(?s:.*)/"
    return f"begun: AFTER {style.begun}"


def _argument_rules(index: int, tool: Tool, schema: Any, parts: _Parts, style: Style) -> list[str]:
    """Rules of one tool: its parameters in their order, optional ones present or not. A string
    stands verbatim, up to its closing tag; its further bounds are not enforced.
    """
    object_ = _as_object(schema)
    properties: Mapping[str, Any] = object_.get("properties", {})
    body, rules = [], []
    for number, (name, inner) in enumerate(properties.items()):
        if set(name) & set("<>\r\n") or not name.strip():
            where = place_name(tool.param, ("properties", name))
            raise InvalidRequest(f"{where}: the model cannot write this name in a call", where)
        rule = f"p_{index}_{number}"
        head, tail = _around_value(style, name)
        values = _string_values(inner)
        if values is not None:
            texts = f"({' | '.join(quoted(each) for each in values if each)})"
            texts = texts.replace("()", "") + ("?" if "" in values and any(values) else "")
            rules.append(f"{rule}: {head} {texts} {tail}")
        elif "string" in allowed_types(inner, object_):
            rules += _text_rules(rule, head, tail, style)
        else:
            refers = _REFERENCE in json.dumps(inner)
            alone = as_root(schema, ("properties", name)) if refers else inner
            parts.add(schema_part(f"value_{index}_{number}", alone))
            rules.append(f"{rule}: {head} @value_{index}_{number} {tail}")
        body.append(rule if name in object_.get("required", ()) else f"{rule}?")
    name, end = f"<function={tool.name}>\n", [quoted("</function>\n")]
    if style.key is not None:
        name, end = f"{tool.name}\n", []
    return [" ".join([f"tool_{index}: {quoted(name)}", *body, *end]), *rules]


def _around_value(style: Style, name: str) -> tuple[str, str]:
    """The text before and behind an argument's value, in Lark."""
    if style.key is None:
        return quoted(f"<parameter={name}>\n"), quoted("\n</parameter>\n")
    key, key_end, value, value_end = style.key
    return f'{key} {quoted(name)} {key_end} "\\n" {value}', f'{value_end} "\\n"'


def _text_rules(rule: str, head: str, tail: str, style: Style) -> list[str]:
    """Text up to `tail`, verbatim."""
    plain = quoted(call_glm.VALUE_END)
    if style.key is None or style.key[3] == plain:
        if style.key is not None:
            tail = quoted(f"{call_glm.VALUE_END}\n")
        return [f"{rule}: {head} {rule}_text", f"{rule}_text[suffix={tail}]: /(?s:.*)/"]
    name = f"{rule}_text".upper()
    return [
        f"{rule}: {head} {name} {tail}",
        f"{name}: /(?s:.*)/ & ~/(?s:.*){call_glm.VALUE_END.replace('/', chr(92) + '/')}(?s:.*)/",
    ]


def _as_object(schema: Any) -> dict[str, Any]:
    """The schema restricted to objects, the only form of arguments."""
    return {"type": "object", **schema} if isinstance(schema, dict) else dict(_MAY_BE_ANY)


def _string_values(schema: Any) -> list[str] | None:
    """The texts of an enum or a const that has nothing else."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return values
    return None
