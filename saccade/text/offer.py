"""The tools that a request offers, and what the model may do with them.

Owns OpenAI's `tools`, the bounds on them, and how they are shown to chat templates. What a choice
means for the answer is `tool_grammar.py`'s. Knows nothing of how calls are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.core.errors import InvalidRequest
from saccade.text.extent import extent
from saccade.text.schema import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 16_384
_MAX_DEPTH = 2 * MAX_SCHEMA_DEPTH
"""Lists and objects within each other in a schema: each level of it takes two, e.g. `properties`
and the property.
"""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a request offers. `param`: where its parameters' schema stands in the request."""

    name: str
    parameters: Any
    strict: bool
    param: str
    description: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it; what is for the server alone is left out."""
        told = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **told, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Offer:
    """`tools`, and of them `choice`: OpenAI's `tool_choice`, as the client wrote it; None: "auto".
    parallel: whether more than one call may be made in an answer.
    """

    tools: tuple[Tool, ...] = ()
    choice: Any = None
    parallel: bool = True

    @property
    def open(self) -> bool:
        """Whether a call may come."""
        return bool(self.tools) and self.choice != "none"

    @property
    def held(self) -> bool:
        """Whether a grammar is needed, or the choice is not well-formed."""
        return self.choice not in (None, "auto", "none") or (
            self.open and any(tool.strict for tool in self.tools)
        )

    @property
    def schemas(self) -> dict[str, Any]:
        """The schema of each tool's parameters, by name."""
        return {tool.name: tool.parameters for tool in self.tools}


NO_TOOLS = Offer()


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
        one = _read_function(function, f"{where}.function")
        if one.name in read:
            where = f"{where}.function.name"
            raise InvalidRequest(f"{where}: a second tool named {one.name!r}", where)
        read[one.name] = one
    return tuple(read.values())


def _read_function(function: Mapping[str, Any], where: str) -> Tool:
    name, description = function.get("name"), function.get("description")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidRequest(
            f"{where}.name: expected 1 to 64 letters, digits, _, . or -", f"{where}.name"
        )
    most = MAX_DESCRIPTION_CHARACTERS
    if not (description is None or (isinstance(description, str) and len(description) <= most)):
        raise InvalidRequest(
            f"{where}.description: expected a text of at most {most} characters",
            f"{where}.description",
        )
    strict = function.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise InvalidRequest(f"{where}.strict: expected true or false", f"{where}.strict")
    parameters = function.get("parameters")
    parameters = _NO_PARAMETERS if parameters is None else parameters
    _check_parameters(parameters, f"{where}.parameters")
    return Tool(name, parameters, strict is True, f"{where}.parameters", description)


def _check_parameters(schema: Any, where: str) -> None:
    """What every use of a schema needs; a grammar asks for more (`schema.prepare_schema`)."""
    size = extent(schema)
    for has, most, what in (
        (size.characters, MAX_SCHEMA_BYTES, "characters"),
        (size.depth, _MAX_DEPTH, "lists and objects within each other"),
    ):
        if has > most:
            raise InvalidRequest(f"{where}: {has} {what}; the limit is {most}", where)
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{where}: expected a JSON schema, an object", where)
    kind, properties = schema.get("type", "object"), schema.get("properties", {})
    if kind != "object":
        raise InvalidRequest(
            f'{where}.type: a tool\'s parameters are an object: expected "object"', f"{where}.type"
        )
    named = isinstance(properties, Mapping)
    if not named or not all(isinstance(each, Mapping | bool) for each in properties.values()):
        raise InvalidRequest(
            f"{where}.properties: expected an object of schemas", f"{where}.properties"
        )
