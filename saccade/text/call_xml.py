"""One call in XML form, character by character, as Qwen3.5 writes it:

    <function=NAME><parameter=NAME>
    VALUE
    </parameter></function></tool_call>

Owns how a value becomes JSON: by the type that the tool's schema gives it, else as a string. Knows
nothing of the text around a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_SPACE = " \t\r\n"
FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_PLAIN = re.compile(r"[^\n<]+")
_MAX_GAP = 64
"""White space between two parameters, in characters; with more, it is part of a value."""
_MAX_NAME = 256


class Arguments:
    """A call's arguments as JSON, written name by name: each value of the type that the tool's
    schema gives it, strings as they come.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        """`tools`: schemas of parameters by tool."""
        self.tool = ""
        self._tools = tools
        self._keys: set[str] = set()
        self._key = ""
        self._value: list[str] = []
        self._streams = False  # the value is a string, passed on as it comes
        self.ready: list[str] = []
        """To be taken."""

    def begin(self, key: str) -> bool:
        """Begin a value; False if it is there."""
        if not key or key in self._keys:
            return False
        self.ready.append(f"{', ' if self._keys else '{'}{_dump(key)}: ")
        self._keys.add(key)
        self._key = key
        self._streams = allowed_types(self._schema(), self._root()) == {"string"}
        if self._streams:
            self.ready.append('"')
        return True

    def add(self, text: str) -> None:
        """More of the value."""
        if self._streams:
            self.ready.append(_dump(text)[1:-1])
        else:
            self._value.append(text)

    def end_value(self) -> None:
        value, self._value = "".join(self._value), []
        written = '"' if self._streams else _dump(typed(value, self._schema(), self._root()))
        self.ready.append(written)

    def end(self) -> None:
        self.ready.append("}" if self._keys else "{}")

    def take(self) -> str:
        taken = "".join(self.ready)
        self.ready.clear()
        return taken

    def _root(self) -> Any:
        return self._tools.get(self.tool)

    def _schema(self) -> Any:
        root = self._root()
        properties = root.get("properties") if isinstance(root, Mapping) else None
        return properties.get(self._key) if isinstance(properties, Mapping) else None


class XmlCall:
    """A call being read."""

    def __init__(self, close: str, tools: Mapping[str, Any]) -> None:
        """`close`: the tag that ends the call. `tools`: schemas of parameters by tool."""
        self.name: str | None = None
        self._close = close
        self._phase = "function"  # function, name, parameter, key, value, close
        self._word = ""  # a tag or a name being read
        self._tail = ""  # the end of a value, or part of one
        self._fresh = False  # nothing of the value was read
        self._arguments = Arguments(tools)
        self.take = self._arguments.take
        self.done = False

    @property
    def certain(self) -> bool:
        return self.name is not None and bool(self._arguments.ready)

    def feed(self, character: str) -> bool:
        """False: the text is no call, and `character` is not part of it."""
        match self._phase:
            case "function":
                return self._feed_tag(character, {FUNCTION: "name"})
            case "name":
                return self._feed_name(character)
            case "parameter":
                return self._feed_tag(character, {_PARAMETER: "key", _FUNCTION_END: "close"})
            case "key":
                return self._feed_name(character)
            case "value":
                self._feed_value(character)
                return True
        return self._feed_tag(character, {self._close: "done"})

    def skip(self, data: str, at: int) -> int:
        """Take the characters of `data` from `at` on that only lengthen a value; returns the index
        of the rest.
        """
        plain = None
        if self._phase == "value" and not self._fresh and not self._tail:
            plain = _PLAIN.match(data, at)
        if plain is None:
            return at
        self._arguments.add(plain.group())
        return plain.end()

    def _feed_tag(self, character: str, tags: Mapping[str, str]) -> bool:
        """Read white space, then one of `tags`, which decides the next state."""
        if character in _SPACE and not self._word:
            return True
        self._word += character
        if self._word in tags:
            self._enter(tags[self._word])
            self._word = ""
            return True
        return any(tag.startswith(self._word) for tag in tags)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self.done = phase == "done"
        if phase == "close":
            self._arguments.end()

    def _feed_name(self, character: str) -> bool:
        if character != ">":
            self._word += character
            return character not in "<\r\n" and len(self._word) <= _MAX_NAME
        name, self._word = self._word.strip(), ""
        if self._phase == "name":
            self.name = self._arguments.tool = name
            self._phase = "parameter"
            return bool(name)
        self._phase, self._fresh = "value", True
        return self._arguments.begin(name)

    def _feed_value(self, character: str) -> None:
        if self._fresh:
            self._fresh = False
            if character == "\n":
                return
        self._tail += character
        while (end := _value_end(self._tail)) is None:
            self._arguments.add(self._tail[0])
            self._tail = self._tail[1:]
        if end:
            self._end_value(end)

    def _end_value(self, tag: str) -> None:
        self._arguments.end_value()
        self._tail = ""
        self._enter("key" if tag == _PARAMETER else "close")


def _value_end(tail: str) -> str | None:
    """The tag after a value that ends in `tail`; empty: more must come; None: no end."""
    rest = tail.removeprefix("\n")
    if len(rest) < len(_PARAMETER_END):
        return "" if _PARAMETER_END.startswith(rest) else None
    if not rest.startswith(_PARAMETER_END):
        return None
    gap = rest[len(_PARAMETER_END) :]
    tag = gap.lstrip(_SPACE)
    if len(gap) - len(tag) > _MAX_GAP:
        return None
    if tag in (_PARAMETER, _FUNCTION_END):
        return tag
    return "" if _PARAMETER.startswith(tag) or _FUNCTION_END.startswith(tag) else None


def typed(text: str, schema: Any, root: Any) -> Any:
    """The value that `text` writes, of a type that `schema` allows; else `text` itself.

    `root`: the schema that references lead into.
    """
    kinds = allowed_types(schema, root)
    word = text.strip()
    if "boolean" in kinds and word in ("True", "False"):
        return word == "True"
    if "null" in kinds and word in ("None", "null"):
        return None
    try:
        value = json.loads(word, parse_constant=_refuse)
        # Neither a number beyond all bounds nor half of a surrogate pair can be told.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return int(value) if "number" not in kinds else value
    return text if isinstance(value, str) or not _kind(value) & kinds else value


def allowed_types(schema: Any, root: Any) -> set[str]:
    """The types allowed by `schema`; string if unspecified."""
    kinds: set[str] = set()
    pending, seen = [schema], set[int]()
    while pending:
        each = pending.pop()
        if id(each) not in seen:
            seen.add(id(each))
            own, others = _own_types(each, root)
            kinds |= own
            pending += others
    return kinds or {"string"}


def _own_types(schema: Any, root: Any) -> tuple[set[str], list[Any]]:
    """The types that a schema itself names, or else the schemas that decide."""
    if not isinstance(schema, Mapping):
        return {"string"}, []
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        names = [kinds] if isinstance(kinds, str) else kinds
        return {kind for kind in names if isinstance(kind, str)}, []
    if "const" in schema:
        return _kind(schema["const"]), []
    if isinstance(schema.get("enum"), list):
        return {kind for value in schema["enum"] for kind in _kind(value)}, []
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return set(), schema[key]
    if isinstance(schema.get("$ref"), str):
        return set(), [follow(schema["$ref"], root)]
    for kind, key in (("object", "properties"), ("array", "items")):
        if key in schema:
            return {kind}, []
    return {"string"}, []


def follow(reference: str, root: Any) -> Any:
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _kind(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
