"""A grammar under which a model calls tools, in its own way of writing calls.

Owns `tool_choice` and the text of these grammars. Knows nothing of how calls are read
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
from saccade.core.lexicon import tag_term
from saccade.text.call_xml import allowed_types
from saccade.text.grammar import Part, Wish, lark_part, schema_part
from saccade.text.schema import as_root, place_name, prepare_schema
from saccade.text.tool_calls import CLOSE, OPEN, Form

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}}

Need = Literal["may", "must"]


@dataclass(frozen=True, slots=True)
class Style:
    """How a model writes calls. opening, closing: its tags, as Lark has them."""

    form: Form
    opening: str
    closing: str

    @classmethod
    def of(cls, form: Form, lexicon: LLTokenizer) -> Style:
        return cls(form, tag_term(lexicon, OPEN), tag_term(lexicon, CLOSE))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a request offers. `param`: where its parameters' schema stands in the request."""

    name: str
    parameters: Any
    strict: bool
    param: str


def read_tools(tools: Sequence[Any] | None) -> tuple[Tool, ...]:
    """The tools of a chat request. Raises InvalidRequest that names the field."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: {len(tools)} tools; the limit is {MAX_TOOLS}", "tools")
    read: dict[str, Tool] = {}
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise InvalidRequest(
                f'{where}: expected {{"type": "function", "function": {{"name": ...}}}}', where
            )
        name, where = function.get("name"), f"{where}.function"
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise InvalidRequest(
                f"{where}.name: expected 1 to 64 letters, digits, _, . or -", f"{where}.name"
            )
        if name in read:
            raise InvalidRequest(f"{where}.name: a second tool named {name!r}", f"{where}.name")
        parameters = function.get("parameters")
        read[name] = Tool(
            name,
            _NO_PARAMETERS if parameters is None else parameters,
            function.get("strict") is True,
            f"{where}.parameters",
        )
    return tuple(read.values())


def read_tool_choice(
    choice: Any, tools: Sequence[Tool], style: Style, parallel: bool = True
) -> Wish | None:
    """The grammar that `tool_choice` asks for; None: the answer is free.

    "none" and "auto" leave it free, but for "auto" with a strict tool: then text is free, and what
    begins as a call has to be one. Raises InvalidRequest that names the field.
    """
    match choice:
        case None | "auto":
            strict = any(tool.strict for tool in tools)
            return calls_wish(tools, style, "may", parallel, "tools") if strict else None
        case "none":
            return None
        case "required":
            chosen = list(tools)
        case {"type": "function", "function": {"name": str(name)}}:
            chosen = [tool for tool in tools if tool.name == name]
        case _:
            raise InvalidRequest(
                'tool_choice: expected "none", "auto", "required" or {"type": "function", '
                '"function": {"name": ...}}',
                "tool_choice",
            )
    if not chosen:
        what = "there are no tools" if choice == "required" else f"no tool is named {name!r}"
        raise InvalidRequest(f"tool_choice: {what}", "tool_choice")
    return calls_wish(chosen, style, "must", parallel and choice == "required", "tool_choice")


def calls_wish(tools: Sequence[Tool], style: Style, need: Need, parallel: bool, param: str) -> Wish:
    """A grammar of calls of `tools`. must: one call, or with `parallel` one after another. may:
    text, in which every <tool_call> begins a call. Raises InvalidRequest that names the place
    within a tool's schema.
    """
    parts: list[Part] = []
    rules = []
    for index, tool in enumerate(tools):
        schema = prepare_schema(tool.parameters, tool.param)
        if style.form == "hermes":
            head = _quoted('{"name": ' + json.dumps(tool.name) + ', "arguments": ')
            parts.append(schema_part(f"arguments_{index}", _as_object(schema)))
            rules.append(f'tool_{index}: {head} @arguments_{index} "}}\\n"')
        else:
            rules += _xml_rules(index, tool, schema, parts)
    any_tool = " | ".join(f"tool_{index}" for index in range(len(tools)))
    if need == "must":
        start = [
            'start: call ("\\n" call)*' if parallel else "start: call",
            f'call: {style.opening} "\\n" called {style.closing}',
        ]
    else:
        start = [
            f"start: (begun called {style.closing}){'*' if parallel else '?'} AFTER",
            f"AFTER: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/",
            _begun(style),
        ]
    lark = "\n".join([*start, f"called: {any_tool}", *rules]) + "\n"
    schemas = tuple(Wish("json", tool.parameters, tool.param) for tool in tools)
    return Wish("parts", [lark_part("calls", lark), *parts], param, inner=schemas)


def _begun(style: Style) -> str:
    """The rule of text up to the first tag that opens a call."""
    if style.opening == _quoted(OPEN):
        return f"begun: before\nbefore[suffix={_quoted(OPEN + chr(10))}]: /(?s:.*)/"
    return f'begun: AFTER {style.opening} "\\n"'


def _xml_rules(index: int, tool: Tool, schema: Any, parts: list[Part]) -> list[str]:
    """Rules of one tool: its parameters in their order, those that are not required left out or
    not. A string stands as it is, up to its closing tag; its further bounds are not held.
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
            alone = as_root(schema, ("properties", name))
            parts.append(schema_part(f"value_{index}_{number}", alone))
            rules.append(f'{rule}: {head} @value_{index}_{number} "\\n</parameter>\\n"')
        body.append(rule if name in object_.get("required", ()) else f"{rule}?")
    head = _quoted(f"<function={tool.name}>\n")
    return [" ".join([f"tool_{index}: {head}", *body, '"</function>\\n"']), *rules]


def _as_object(schema: Any) -> dict[str, Any]:
    """Arguments are an object, whatever else their schema says."""
    return {"type": "object", **schema} if isinstance(schema, dict) else dict(_NO_PARAMETERS)


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
