"""Converts the arguments of a call from strings to JSON, with types from the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.text.grammar.schema_types import allowed_types, types_of


class TypedArguments:
    """Writes the arguments of a call as JSON, one after another.

    Each value gets a type that the tool's schema allows. Strings are returned while they arrive.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        """Start a call. tools: the schema of each tool's parameters, by name."""
        self.tool = ""
        self._tools = tools
        self._keys: set[str] = set()
        self._key = ""
        self._value: list[str] = []
        self._streams = False  # the value is a string, which is returned as it arrives
        self.ready: list[str] = []
        """Pieces of JSON that `take_arguments` returns next."""

    def begin_value(self, key: str) -> bool:
        """Start the value of the argument `key`. Returns False if the key is empty or a
        duplicate.
        """
        if not key or key in self._keys:
            return False
        self.ready.append(f"{', ' if self._keys else '{'}{_dump(key)}: ")
        self._keys.add(key)
        self._key = key
        self._streams = allowed_types(self._schema(), self._root()) == {"string"}
        if self._streams:
            self.ready.append('"')
        return True

    def add_text(self, text: str) -> None:
        """Add text to the current value."""
        if self._streams:
            self.ready.append(_dump(text)[1:-1])
        else:
            self._value.append(text)

    def end_value(self) -> None:
        value, self._value = "".join(self._value), []
        written = '"' if self._streams else _dump(typed(value, self._schema(), self._root()))
        self.ready.append(written)

    def end_object(self) -> None:
        self.ready.append("}" if self._keys else "{}")

    def take_arguments(self) -> str:
        taken = "".join(self.ready)
        self.ready.clear()
        return taken

    def _root(self) -> Any:
        return self._tools.get(self.tool)

    def _schema(self) -> Any:
        root = self._root()
        properties = root.get("properties") if isinstance(root, Mapping) else None
        return properties.get(self._key) if isinstance(properties, Mapping) else None


class TypedCall:
    """Base class for parsers of calls whose arguments are named strings.

    A subclass detects the end of a value, and parses the text around values.
    """

    plain: ClassVar[re.Pattern[str]]
    """Matches characters that cannot start the end of a value."""

    def __init__(self, tools: Mapping[str, Any], phase: str) -> None:
        """Start a call. tools: as in `TypedArguments`. phase: the first state of the parser."""
        self.name: str | None = None
        self.done = False
        self._phase = phase
        self._word = ""  # the text being read outside of values
        self._tail = ""  # possibly the end of a value, or a part of it
        self._arguments = TypedArguments(tools)
        self.take_arguments = self._arguments.take_arguments

    @property
    def certain(self) -> bool:
        return self.name is not None and bool(self._arguments.ready)

    def skip(self, data: str, at: int) -> int:
        """Consume the characters from `at` on in `data` that cannot end a value.

        Returns the index after them.
        """
        reading = self._phase == "value" and not self._tail
        plain = self.plain.match(data, at) if reading else None
        if plain is None:
            return at
        self._arguments.add_text(plain.group())
        return plain.end()

    def feed_value(self, character: str) -> str:
        """Parse a character of a value. Returns the tag that ended the value, or "" if none has
        yet.
        """
        self._tail += character
        while (end := self.value_end(self._tail)) is None:
            self._arguments.add_text(self._tail[0])
            self._tail = self._tail[1:]
        if end:
            self._arguments.end_value()
            self._tail = ""
        return end

    def value_end(self, tail: str) -> str | None:
        """Return the tag after a value if `tail` is the end of one.

        Returns "" if more input is needed to decide, and `None` if the value continues.
        """
        raise NotImplementedError


def typed(text: str, schema: Any, root: Any) -> Any:
    """Convert `text` to a type that `schema` allows. Returns `text` itself if it cannot be
    converted.

    root: the schema that contains the targets of `$ref`.
    """
    kinds = allowed_types(schema, root)
    word = text.strip()
    if "boolean" in kinds and word in ("True", "False"):
        return word == "True"
    if "null" in kinds and word in ("None", "null"):
        return None
    try:
        value = json.loads(word, parse_constant=_refuse)
        # Infinite numbers and lone surrogates cannot be encoded.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return int(value) if "number" not in kinds else value
    return text if isinstance(value, str) or not types_of(value) & kinds else value


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
