"""Lark rules for a tool's arguments in the format of Gemma 4 (`call.py`).

Numbers follow their schema exactly. For other values, the rules enforce types, alternatives,
constants, array lengths, and required and optional properties; other bounds are ignored.
Properties are in the order in which the chat templates sort them. Values that would be parsed
differently from how they are written are rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.core.errors import InvalidRequest
from saccade.plugins.tool_formats.formats import QUOTE
from saccade.plugins.tool_formats.gemma.call import MAX_WORD
from saccade.text.grammar.parts import Part, quoted, schema_part
from saccade.text.grammar.schema_types import Place, follow, place_name

_UNWRITABLE = frozenset('{}[],:<>"\r\n')
"""Characters that would end a bare key, or start a quoted one."""
_PLAIN_QUOTE = json.dumps(QUOTE)


class GemmaRules:
    """Builds the rules for the values of one tool. `rules` and `parts` grow as values are
    requested.
    """

    def __init__(self, prefix: str, root: Any, param: str, quote: str) -> None:
        """Start the rules of one tool.

        prefix: the prefix of the rules' names.
        root: the schema that contains the targets of `$ref`.
        param: the field of the schema in the request.
        quote: the grammar term for the tag around strings.
        """
        self.rules: list[str] = []
        self.parts: list[Part] = []
        self._prefix, self._root, self._param, self._quote = prefix, root, param, quote
        self._of_references: dict[str, str] = {}
        self._any = ""
        self._text = ""

    def object(self, schema: Any, place: Place = ()) -> str:
        """Return the name of the rule for an object. Raises InvalidRequest if a property cannot be
        written.
        """
        properties, needed = schema.get("properties", {}), schema.get("required", ())
        names = {*properties, *needed}
        if not names:
            closed = schema.get("additionalProperties") is False
            return '"{" "}"' if closed else self._anything("object")
        pairs = []
        for name in sorted(names, key=lambda each: (each.lower(), each)):
            where = (*place, "properties", name)
            key = self._key(name, where)
            pairs.append((f"{key} {self._value(properties.get(name), where)}", name in needed))
        return self._rule(f'"{{" {self._members(pairs)} "}}"')

    def _key(self, name: str, place: Place) -> str:
        """Return the grammar term for a bare key and its colon.

        Raises InvalidRequest for a key that `GemmaCall` would reject.
        """
        plain = bool(name) and name == name.strip() and not set(name) & _UNWRITABLE
        if not plain or len(name) > MAX_WORD:
            where = place_name(self._param, place)
            raise InvalidRequest(f"{where}: the model cannot write this name in a call", where)
        return quoted(f"{name}:")

    def _members(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Return the name of the rule for these (pair, required) members in this order, separated
        by commas.
        """
        after = self._rule('""')  # the members that may follow one
        first = after  # the members, if none precedes them
        for pair, needed in reversed(pairs):
            one = self._rule(pair)
            ways = f'"," {one} {after}', f"{one} {after}"
            after, first = (
                self._rule(way if needed else f"{way} | {rest}")
                for way, rest in zip(ways, (after, first), strict=True)
            )
        return first

    def _value(self, schema: Any, place: Place) -> str:
        if not isinstance(schema, Mapping):
            return self._anything("value")
        if isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference, place)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return self._rule(" | ".join(self._constant(each, place) for each in values))
        kinds = schema.get("type")
        if kinds is None:
            for key in ("anyOf", "oneOf"):
                if ways := schema.get(key):
                    found = (self._value(each, (*place, key, i)) for i, each in enumerate(ways))
                    return self._rule(" | ".join(found))
            kinds = [
                k for k, key in (("object", "properties"), ("array", "items")) if key in schema
            ]
        names = [kinds] if isinstance(kinds, str) else kinds
        if not names:
            return self._anything("value")
        return self._rule(" | ".join(self._of_type(each, schema, place) for each in names))

    def _of_type(self, kind: str, schema: Mapping[str, Any], place: Place) -> str:
        match kind:
            case "integer" | "number":
                name = f"{self._prefix}_n{len(self.parts)}"
                self.parts.append(schema_part(name, {**schema, "type": kind}))
                return f"@{name}"
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, place)
            case "object":
                return self.object(schema, place)
        return self._string()

    def _array(self, schema: Mapping[str, Any], place: Place) -> str:
        item = self._value(schema.get("items"), (*place, "items"))
        if "prefixItems" in schema:
            item = self._anything("value")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        row = f'{item} ("," {item}){more}'
        return self._rule(f'"[" {row} "]"' if least else f'"[" "]" | "[" {row} "]"')

    def _referred(self, reference: str, place: Place) -> str:
        name = self._of_references.get(reference)
        if name is None:
            name = self._of_references[reference] = f"{self._prefix}_r{len(self._of_references)}"
            self.rules.append(f"{name}: {self._value(follow(reference, self._root), place)}")
        return name

    def _constant(self, value: Any, place: Place) -> str:
        if isinstance(value, str):
            if QUOTE in value:
                where = place_name(self._param, place)
                raise InvalidRequest(f"{where}: the model cannot write {QUOTE} in a text", where)
            return f"{self._quote} {quoted(value)} {self._quote}"
        if isinstance(value, list):
            return '"[" ' + ' "," '.join(self._constant(v, place) for v in value) + ' "]"'
        if isinstance(value, dict):
            pairs = (f"{self._key(k, place)} {self._constant(v, place)}" for k, v in value.items())
            return '"{" ' + ' "," '.join(pairs) + ' "}"'
        return quoted(json.dumps(value))

    def _string(self) -> str:
        if self._text:
            return self._text
        name = self._text = f"{self._prefix}_text"
        if self._quote == _PLAIN_QUOTE:
            self.rules.append(f"{name}: {_PLAIN_QUOTE} {name}_rest")
            self.rules.append(f"{name}_rest[suffix={_PLAIN_QUOTE}]: /(?s:.*)/")
        else:
            inner = name.upper()
            quote = re.escape(QUOTE)
            self.rules.append(f"{name}: {self._quote} {inner} {self._quote}")
            self.rules.append(f"{inner}: /(?s:.*)/ & ~/(?s:.*){quote}(?s:.*)/")
        return name

    def _anything(self, kind: str) -> str:
        if not self._any:
            self._any = name = f"{self._prefix}_any"
            self.parts.append(schema_part(f"{name}_number", {"type": "number"}))
            words = f'@{name}_number | "true" | "false" | "null"'
            key = name.upper() + "_KEY"
            self.rules += [
                f"{name}_value: {self._string()} | {words} | {name}_array | {name}_object",
                f'{name}_array: "[" ({name}_value ("," {name}_value)*)? "]"',
                f'{name}_object: "{{" ({name}_pair ("," {name}_pair)*)? "}}"',
                f'{name}_pair: {key} ":" {name}_value',
                rf"{key}: /[a-zA-Z0-9_\-.$]{{1,64}}/",
            ]
        return f"{self._any}_{kind}"

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name
