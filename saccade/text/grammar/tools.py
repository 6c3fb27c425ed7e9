"""A request's tools, and how the model may use them.

Owns OpenAI's `tools`, the bounds on them, and their form for chat templates. `tool_grammar.py`
turns a choice into a grammar.
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
"""Maximum characters of all names, descriptions and schemas in a request."""
_MAX_DEPTH = 2 * MAX_SCHEMA_DEPTH
"""Lists and objects within each other in a schema: each level of it takes two, e.g. `properties`
and the property.
"""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool in a request."""

    name: str
    parameters: Any
    strict: bool
    place: str  # place, param: field paths of its name and its parameters' schema in the request
    param: str
    description: str | None
    num_characters: int  # how long name, description and schema are
    # schemas of which one applies, if they are stricter than `parameters`
    cases: tuple[Any, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """Return the tool for chat templates, without fields for the server alone."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """A request's tools and `choice` among them."""

    tools: tuple[Tool, ...] = ()
    choice: Any = None  # OpenAI's `tool_choice`, as the client wrote it. `None` means "auto".
    parallel: bool = True  # an answer may have more than one call
    hidden: bool = False  # the messages describe the tools instead of the template
    # schemas depend on the request's images, so that no grammar is compiled before these are open
    late: bool = False

    @property
    def open(self) -> bool:
        """Return True if a call is allowed."""
        return bool(self.tools) and self.choice != "none"

    @property
    def held(self) -> bool:
        """Return True if a grammar is needed, or the choice is malformed."""
        return self.choice not in (None, "auto", "none") or (
            self.open and any(tool.strict for tool in self.tools)
        )

    @property
    def schemas(self) -> dict[str, Any]:
        """Return the schema of each tool's parameters, by name."""
        return {tool.name: tool.parameters for tool in self.tools}


def read_each(given: Sequence[T] | None, read: Callable[[T, str], Tool | None]) -> tuple[Tool, ...]:
    """Read a request's tools in any dialect.

    `read` makes a tool from the value at a place, or None if it is no function. Raises
    InvalidRequest for too many, for equal names, and for too much text.
    """
    if given is not None and len(given) > MAX_TOOLS:
        raise InvalidRequest(f"tools: {len(given)} tools; the limit is {MAX_TOOLS}", "tools")
    named: dict[str, Tool] = {}
    for index, each in enumerate(given or ()):
        tool = read(each, f"tools[{index}]")
        if tool is None:
            continue
        if tool.name in named:
            where = f"{tool.place}.name"
            raise InvalidRequest(f"{where}: a second tool named {tool.name!r}", where)
        named[tool.name] = tool
    if (size := sum(tool.num_characters for tool in named.values())) > MAX_TOOLS_CHARACTERS:
        raise InvalidRequest(
            f"tools: {size} characters in all; the limit is {MAX_TOOLS_CHARACTERS}: offer fewer, "
            "or shorten their descriptions",
            "tools",
        )
    return tuple(named.values())


def not_run(kind: str, where: str, run: str = '"function" is') -> InvalidRequest:
    """Return the error for a tool that is no function. `run`: the types that are supported."""
    return InvalidRequest(
        f"{where}.type: {kind[:100]!r} is a tool that this server does not run: only {run} "
        "supported, which your program runs",
        f"{where}.type",
        "unsupported_parameter",
    )


def read_tool(tool: Any, where: str) -> Tool:
    """Read a chat's tool. Raises InvalidRequest that names the fault's place."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(
            f'{where}: expected {{"type": "function", "function": {{"name": ...}}}}', where
        )
    return read_function(function, f"{where}.function")


def read_function(function: Mapping[str, Any], where: str, schema: str = "parameters") -> Tool:
    """Read a tool from its name, description, strict and its input's schema.

    `schema` is that schema's key. Raises InvalidRequest that names the fault's place below `where`.
    """
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
    parameters = function.get(schema)
    parameters = _NO_PARAMETERS if parameters is None else parameters
    size = _check_parameters(parameters, f"{where}.{schema}") + len(name) + len(description or "")
    return Tool(name, parameters, strict is True, where, f"{where}.{schema}", description, size)


def _check_parameters(schema: Any, where: str) -> int:
    """Check a schema's basics, and return how many characters it has.

    A grammar needs more (`schema.prepare_schema`).
    """
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
    return size.characters
