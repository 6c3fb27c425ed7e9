"""A grammar for a model's tool calls, in the model's own spelling.

Owns the meaning of `tool_choice` and the text of these grammars. Knows nothing of reading calls
(`tool_calls.py`) or of matchers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLTokenizer

from saccade.core.errors import InvalidRequest
from saccade.core.grammar_vocab import tag_term
from saccade.text.call_xml import allowed_types
from saccade.text.grammar import OutputConstraint, Part, lark_part, schema_part
from saccade.text.json_size import extent
from saccade.text.schema import as_root, place_name, prepare_schema
from saccade.text.tool_calls import CLOSE, OPEN, Form
from saccade.text.tools import Tool

_MAY_BE_ANY = {"type": "object"}

_REFERENCE = '"$ref"'
_MAX_CHARACTERS = 524_288
"""Of the schemas within one grammar, which takes about a second to compile then. In the XML form
each value that refers to others has them all in a schema of its own.
"""

Need = Literal["may", "must"]


@dataclass(frozen=True, slots=True)
class Style:
    """A model's way to write calls. opening, closing: its tags in Lark."""

    form: Form
    opening: str
    closing: str

    @classmethod
    def of(cls, form: Form, lexicon: LLTokenizer) -> Style:
        return cls(form, tag_term(lexicon, OPEN), tag_term(lexicon, CLOSE))


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
        if style.form == "hermes":
            head = _quoted('{"name": ' + json.dumps(tool.name) + ', "arguments": ')
            parts.add(schema_part(f"arguments_{index}", _as_object(schema)))
            rules.append(f'tool_{index}: {head} @arguments_{index} "}}\\n"')
        else:
            rules += _xml_rules(index, tool, schema, parts)
    any_tool = " | ".join(f"tool_{index}" for index in range(len(tools)))
    # The rule for the whole answer.
    if need == "must":
        start = [
            "start: calls" if answer is None else "start: calls | @answer",
            'calls: call ("\\n" call)*' if parallel else "calls: call",
            f'call: {style.opening} "\\n" called {style.closing}',
        ]
    else:
        start = [
            f"start: (begun called {style.closing}){'*' if parallel else '?'} AFTER",
            f"AFTER: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/",
            _begun(style),
        ]
    if answer is not None:
        parts.add(_answer_part(answer))
    lark = "\n".join([*start, f"called: {any_tool}", *rules]) + "\n"
    schemas = [OutputConstraint("json", tool.parameters, tool.param) for tool in tools]
    if answer is not None:
        schemas.append(answer)
    return OutputConstraint(
        "parts", [lark_part("calls", lark), *parts.made], param, inner=tuple(schemas)
    )


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
    if style.opening == _quoted(OPEN):
        return f"begun: before\nbefore[suffix={_quoted(OPEN + chr(10))}]: /(?s:.*)/"
    return f'begun: AFTER {style.opening} "\\n"'


def _xml_rules(index: int, tool: Tool, schema: Any, parts: _Parts) -> list[str]:
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
        head = _quoted(f"<parameter={name}>\n")
        values = _string_values(inner)
        if values is not None:
            texts = " | ".join(_quoted(f"{value}\n</parameter>\n") for value in values)
            rules.append(f"{rule}: {head} ({texts})")
        elif "string" in allowed_types(inner, object_):
            rules.append(f"{rule}: {head} {rule}_text")
            rules.append(f'{rule}_text[suffix="\\n</parameter>\\n"]: /(?s:.*)/')
        else:
            refers = _REFERENCE in json.dumps(inner)
            alone = as_root(schema, ("properties", name)) if refers else inner
            parts.add(schema_part(f"value_{index}_{number}", alone))
            rules.append(f'{rule}: {head} @value_{index}_{number} "\\n</parameter>\\n"')
        body.append(rule if name in object_.get("required", ()) else f"{rule}?")
    head = _quoted(f"<function={tool.name}>\n")
    return [" ".join([f"tool_{index}: {head}", *body, '"</function>\\n"']), *rules]


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


def _quoted(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False)
