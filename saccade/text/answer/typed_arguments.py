"""A call's arguments, sent as texts by name. Each becomes JSON in the type that the
tool's schema gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from saccade.text.grammar.schema_types import allowed_types, types_of


class TypedArguments:
    """A call's arguments as JSON, written name by name.

    Each value has the type that the tool's schema gives it. Strings are passed on as they come.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        """Begin a call. `tools`: parameters' schemas by tool."""
        self.tool = ""
        self._tools = tools
        self._keys: set[str] = set()
        self._key = ""
        self._value: list[str] = []
        self._streams = False  # the value is a string, passed on as it comes
        self.ready: list[str] = []
        """To be taken."""

    def begin_value(self, key: str) -> bool:
        """Begin a value. Return False if its name is empty or was written before."""
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
        """Add text to the value."""
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
    """A call being read, whose arguments are texts by name.

    A format derives from it, defines the end of a value, and reads the text around values.
    """

    plain: ClassVar[re.Pattern[str]]
    """Characters that begin no end of a value."""

    def __init__(self, tools: Mapping[str, Any], phase: str) -> None:
        """Begin a call. `tools`: parameters' schemas by tool. `phase`: what is read first."""
        self.name: str | None = None
        self.done = False
        self._phase = phase
        self._word = ""  # what is being read, but values
        self._tail = ""  # the end of a value, or part of one
        self._arguments = TypedArguments(tools)
        self.take_arguments = self._arguments.take_arguments

    @property
    def certain(self) -> bool:
        return self.name is not None and bool(self._arguments.ready)

    def skip(self, data: str, at: int) -> int:
        """Take the characters in `data` from `at` on that only lengthen a value.

        Returns the index behind them.
        """
        reading = self._phase == "value" and not self._tail
        plain = self.plain.match(data, at) if reading else None
        if plain is None:
            return at
        self._arguments.add_text(plain.group())
        return plain.end()

    def feed_value(self, character: str) -> str:
        """Read on in a value. Return the tag after it, or an empty string if it continues."""
        self._tail += character
        while (end := self.value_end(self._tail)) is None:
            self._arguments.add_text(self._tail[0])
            self._tail = self._tail[1:]
        if end:
            self._arguments.end_value()
            self._tail = ""
        return end

    def value_end(self, tail: str) -> str | None:
        """Return the tag after a value that ends in `tail`.

        Returns an empty string if more input is needed, and `None` if the value continues.
        """
        raise NotImplementedError


def typed(text: str, schema: Any, root: Any) -> Any:
    """Return the value that `text` writes in a type that `schema` allows, else `text` itself.

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
        # Neither infinite numbers nor lone surrogates can be encoded.
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
