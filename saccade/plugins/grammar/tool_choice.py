"""Builds grammars for tool calls in the model's own format, as `tool_choice` requires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from saccade.core.errors import InvalidRequest
from saccade.plugins.grammar.schema import prepare_schema
from saccade.text.grammar.call_grammar import CallGrammar, Need, ValueParts
from saccade.text.grammar.constraint import OutputConstraint
from saccade.text.grammar.parts import Part, lark_part, schema_part
from saccade.text.grammar.tools import Tool


def read_tool_choice(
    choice: Any,
    tools: Sequence[Tool],
    spelling: CallGrammar,
    parallel: bool = True,
    answer: OutputConstraint | None = None,
) -> OutputConstraint | None:
    """Return the grammar for `tool_choice`, or `None` if the answer is not constrained.

    spelling: the model's format of calls.
    answer: the format of an answer without calls.

    The answer is not constrained for "none", nor for "auto" unless a tool is strict. With a strict
    tool, text is free, but a call must be complete once it has started. Raises InvalidRequest with
    the field.
    """
    match choice:
        case None | "auto":
            if answer is not None:
                return calls_constraint(tools, spelling, "must", parallel, "tools", answer)
            strict = any(tool.strict for tool in tools)
            return calls_constraint(tools, spelling, "may", parallel, "tools") if strict else None
        case "none":
            return answer
        case "required":
            chosen, several = list(tools), parallel
            what = "there are no tools"
        case {"type": "function", "function": {"name": str(name)}}:
            chosen, several = [tool for tool in tools if tool.name == name], False
            what = f"no tool is named {name[:100]!r}"
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            return _allowed(mode, allowed, tools, spelling, parallel, answer)
        case _:
            raise InvalidRequest(
                'tool_choice: expected "none", "auto", "required" or {"type": "function", '
                '"function": {"name": ...}}',
                "tool_choice",
            )
    if not chosen:
        raise InvalidRequest(f"tool_choice: {what}", "tool_choice")
    return calls_constraint(chosen, spelling, "must", several, "tool_choice")


def _allowed(
    mode: object,
    allowed: Sequence[Any],
    tools: Sequence[Tool],
    spelling: CallGrammar,
    parallel: bool,
    answer: OutputConstraint | None,
) -> OutputConstraint:
    """Return a grammar that allows calls to only some of the tools.

    mode: auto if calls are optional, or required.
    """
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
                raise InvalidRequest(f"{place}: no tool has this name", place)
    if not chosen:
        raise InvalidRequest(
            f"{where}.tools: the list must name at least one tool", f"{where}.tools"
        )
    several = list(chosen.values())
    if mode == "auto" and answer is None:
        return calls_constraint(several, spelling, "may", parallel, "tool_choice")
    free = answer if mode == "auto" else None
    return calls_constraint(several, spelling, "must", parallel, "tool_choice", free)


def calls_constraint(
    tools: Sequence[Tool],
    spelling: CallGrammar,
    need: Need,
    parallel: bool,
    param: str,
    answer: OutputConstraint | None = None,
) -> OutputConstraint:
    """Return a grammar for calls to `tools`.

    need: with `must`, the answer is a call, several in a row with `parallel`, or the format
    `answer`. With `may`, it is text in which each opening tag starts a call.

    Raises InvalidRequest with the location of an error in a tool's schema.
    """
    parts = ValueParts(param)
    rules = []
    tools = [
        replace(tool, parameters=case)
        for tool in tools
        for case in tool.cases or (tool.parameters,)
    ]
    for index, tool in enumerate(tools):
        schema = prepare_schema(tool.parameters, tool.param)
        rules += spelling.tool_rules(index, tool, schema, parts)
    any_tool = " | ".join(f"tool_{index}" for index in range(len(tools)))
    start = spelling.answer_rules(need, parallel, answer is not None)
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
            f"{answer.param}: together with optional tools, only JSON output is supported: send "
            'tool_choice "none" or "required"',
            answer.param,
            "unsupported_parameter",
        )
    return schema_part("answer", prepare_schema(answer.value, answer.param), answer.spacing)
