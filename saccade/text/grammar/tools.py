"""The tools of a request: OpenAI's `tools` and `tool_choice`, their limits, and their form in chat
templates. `plugins/grammar/tool_choice.py` converts a tool choice to a grammar.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from saccade.core.errors import InvalidRequest
from saccade.text.grammar.json_size import extent
from saccade.text.grammar.schema_types import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH

T = TypeVar("T")

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 16_384
MAX_TOOLS_CHARACTERS = 524_288
"""Maximum number of characters in all names, descriptions and schemas of a request."""
_MAX_DEPTH = 2 * MAX_SCHEMA_DEPTH
"""Maximum nesting depth of lists and objects in a schema. Each level of schemas takes two of them,
such as `properties` and a property.
"""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of a request, with its field in the request for error messages."""

    name: str
    parameters: Any
    strict: bool
    place: str  # the tool's field in the request
    param: str  # the field of its parameters' schema
    description: str | None
    num_characters: int  # total length of name, description and schema
    # alternative schemas, one of which applies, if they are stricter than `parameters`
    cases: tuple[Any, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format, as chat templates expect it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request, and whether the model must call them."""

    tools: tuple[Tool, ...] = ()
    choice: Any = None  # OpenAI's `tool_choice` as the client wrote it; `None`: "auto"
    parallel: bool = True  # the response may have more than one call
    hidden: bool = False  # the messages describe the tools, so the template must not
    # schemas depend on the request's images, so grammars are compiled after these were opened
    late: bool = False

    @property
    def open(self) -> bool:
        """True if the model may call tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def held(self) -> bool:
        """True if a grammar must constrain the response, or if the tool choice is malformed."""
        return self.choice not in (None, "auto", "none") or (
            self.open and any(tool.strict for tool in self.tools)
        )

    @property
    def schemas(self) -> dict[str, Any]:
        """The schema of each tool's parameters, by name."""
        return {tool.name: tool.parameters for tool in self.tools}


def read_each(given: Sequence[T] | None, read: Callable[[T, str], Tool | None]) -> tuple[Tool, ...]:
    """Convert the tools of a request, in any API's format.

    read: converts the value at a path to a tool, or returns None if the value is not a function.

    Raises InvalidRequest for too many tools, duplicate names, or too much text.
    """
    if given is not None and len(given) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools has {len(given)} tools; the limit is {MAX_TOOLS}: send fewer", "tools"
        )
    named: dict[str, Tool] = {}
    for index, each in enumerate(given or ()):
        tool = read(each, f"tools[{index}]")
        if tool is None:
            continue
        if tool.name in named:
            where = f"{tool.place}.name"
            raise InvalidRequest(f"{where}: the tool name {tool.name!r} is used twice", where)
        named[tool.name] = tool
    if (size := sum(tool.num_characters for tool in named.values())) > MAX_TOOLS_CHARACTERS:
        raise InvalidRequest(
            f"tools has {size} characters in total; the limit is {MAX_TOOLS_CHARACTERS}: send "
            "fewer, or shorten their descriptions",
            "tools",
        )
    return tuple(named.values())


def not_run(kind: str, where: str, run: str = '"function" is') -> InvalidRequest:
    """Return the error for a tool that is not a function. run: words for the supported types."""
    return InvalidRequest(
        f"{where}.type: {kind[:100]!r} is a tool that this server does not run: only {run} "
        "supported, which your program runs",
        f"{where}.type",
        "unsupported_parameter",
    )


def read_tool(tool: Any, where: str) -> Tool:
    """Convert a tool of a chat completion. Raises InvalidRequest that names the field."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(
            f'{where}: expected {{"type": "function", "function": {{"name": ...}}}}', where
        )
    return read_function(function, f"{where}.function")


def read_function(function: Mapping[str, Any], where: str, schema: str = "parameters") -> Tool:
    """Convert a function with a name, description, strict, and the schema of its input.

    schema: the key of that schema. Raises InvalidRequest that names the field below `where`.
    """
    name, description = function.get("name"), function.get("description")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidRequest(
            f"{where}.name: expected 1 to 64 letters, digits, _, . or -", f"{where}.name"
        )
    most = MAX_DESCRIPTION_CHARACTERS
    if not (description is None or (isinstance(description, str) and len(description) <= most)):
        raise InvalidRequest(
            f"{where}.description: expected a string of at most {most} characters",
            f"{where}.description",
        )
    strict = function.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise InvalidRequest(f"{where}.strict: expected true or false", f"{where}.strict")
    parameters = function.get(schema)
    parameters = _NO_PARAMETERS if parameters is None else parameters
    size = _check_parameters(parameters, f"{where}.{schema}") + len(name) + len(description or "")
    return Tool(name, parameters, strict is True, where, f"{where}.{schema}", description, size)


def _check_parameters(schema: Any, where: str) -> int:
    """Check the size and outer structure of a schema. Returns its number of characters.

    `schema.prepare_schema` checks the rest, if a grammar is compiled.
    """
    size = extent(schema)
    for has, most, what in (
        (size.characters, MAX_SCHEMA_BYTES, "characters"),
        (size.depth, _MAX_DEPTH, "lists and objects within each other"),
    ):
        if has > most:
            raise InvalidRequest(f"{where} has {has} {what}; the limit is {most}", where)
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
    return size.characters
