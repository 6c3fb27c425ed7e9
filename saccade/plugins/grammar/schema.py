"""Prepares JSON schemas for grammars: checks them, and rewrites parts.

It enforces limits, rejects unsupported keywords, and works around two gaps of the library: schemas
that only infinite documents satisfy, and `oneOf` with disjoint branches.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from saccade.core.errors import InvalidRequest
from saccade.text.grammar.schema_types import (
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    Place,
    as_root,
    place_name,
)

MAX_NESTING = 3 * MAX_SCHEMA_DEPTH
"""Maximum nesting of objects and lists of any type, because the parser is recursive."""
MAX_SCHEMAS = 4_000
"""Maximum schemas in total. A schema that is referenced several times counts once."""
MAX_PROPERTIES = 1_000
MAX_ENUM_VALUES = 5_000
"""Maximum number of properties and of `enum` values, each in total. 1,000 optional properties take
50 ms to compile, and 5,000 values 25 ms.
"""
MAX_MULTIPLE = 1_000
"""Maximum least common multiple of all `multipleOf` that apply to a number. The grammar tracks each
remainder: 1,000,003 of them take 6 s to compile.
"""

MAX_INTERSECTED = 8
"""Maximum number of patterns that one string must match. With n of them, a token can take 2^n
operations, which the library's limits do not count; 20 take 10 s to compile.
"""

_MAX_MERGED = 20_000
"""Maximum schemas visited to resolve an `allOf`. Each visit of a schema counts."""
_MAX_TRIED = 64
"""Maximum inner schemas that are compiled separately, to locate an error."""
_MAX_BRANCHES = 64
"""Maximum branches of a `oneOf` that are compared pairwise."""

_ONE = ("items", "additionalProperties", "additionalItems")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP = ("properties", "$defs", "definitions")
_SAME = ("anyOf", "oneOf", "allOf")
"""Keywords whose schemas apply to the same document as the schema that contains them."""
_DEFINED = ("$defs", "definitions")
_UNSUPPORTED = frozenset(
    (
        "patternProperties",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
        "x-guidance",
    )
)
_TYPES = frozenset(("null", "boolean", "object", "array", "number", "integer", "string"))
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_NUMBER, _COUNT = "a number", "a whole number of at least 0"
_KINDS = {
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBER
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        _COUNT,
    ),
    **dict.fromkeys(_MAP, "an object of schemas"),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), "a list of schemas that is not empty"),
    "prefixItems": "a list of schemas",
    **dict.fromkeys(("pattern", "format", "$ref"), "a string"),
    "enum": "a list that is not empty",
    "required": "a list of names",
    "uniqueItems": "true or false",
}


def _is_deep(value: Any) -> bool:
    """Return True if objects and lists are nested deeper than `MAX_NESTING`."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        nested = (each for each in level if isinstance(each, dict | list))
        level = [
            inner
            for each in nested
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def prepare_schema(schema: Any, param: str) -> Any:
    """Return a copy of `schema`, checked and rewritten for the library.

    Raises InvalidRequest with the location in `param` if a schema is malformed, exceeds the limits,
    uses unsupported keywords (`not`, `if`, `patternProperties`, ...), or is satisfied only by
    infinite documents.
    """
    if _is_deep(schema):
        raise InvalidRequest(
            f"{param}: objects and lists are nested over {MAX_NESTING} deep: make it flatter", param
        )
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param) from None
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"{param}: the schema has {size} bytes; the limit is {MAX_SCHEMA_BYTES}: "
            "make it smaller",
            param,
        )
    checked = _Checked(json.loads(text), param)
    checked.refuse_endless()
    checked.refuse_intersections()
    checked.reword()
    return checked.root


class _Checked:
    """A schema in which all parts have been checked.

    nodes: the inner schemas by location.
    """

    def __init__(self, root: Any, param: str) -> None:
        self.root = root
        self.nodes: dict[Place, Any] = {}
        self._param = param
        self._properties = self._values = 0
        self._multiple = 1
        self._visit(())
        pending = list(self.nodes)
        while pending:  # visit schemas that are only reachable by references
            before = set(self.nodes)
            for place in pending:
                if (target := self.target(place)) is not None:
                    self._visit(target)
            pending = [place for place in self.nodes if place not in before]

    def target(self, place: Place) -> Place | None:
        """Return the location that a schema's `$ref` refers to, or `None` if it has none."""
        node = self.nodes[place]
        reference = node.get("$ref") if isinstance(node, dict) else None
        if reference is None:
            return None
        if not (reference == "#" or reference.startswith("#/")):
            self._refuse((*place, "$ref"), f"{reference!r} is not within this schema ('#/...')")
        at: Place = ()
        found = self.root
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found, at = found[key], (*at, key)
            elif (
                isinstance(found, list)
                and re.fullmatch("0|[1-9][0-9]{0,5}", key)
                and (int(key) < len(found))
            ):
                found, at = found[int(key)], (*at, int(key))
            else:
                self._refuse((*place, "$ref"), f"{reference!r} does not exist")
        return at

    def children(self, place: Place) -> Iterator[Place]:
        """Yield the locations of the schemas directly within the schema at `place`, without those
        in `$defs`.
        """
        node = self.nodes[place]
        for key in node if isinstance(node, dict) else ():
            if key in _MAP:
                yield from ((*place, key, name) for name in node[key])
            elif key in _LIST or (key == "items" and isinstance(node[key], list)):
                yield from ((*place, key, index) for index in range(len(node[key])))
            elif key in _ONE:
                yield (*place, key)

    def refuse_endless(self) -> None:
        """Raise InvalidRequest for a schema that only infinite documents satisfy."""
        ends: set[Place] = set()
        waiting: dict[Place, list[Place]] = {}  # by part, the schemas that depend on it
        for place in self.nodes:
            target = self.target(place)
            for part in (*self.children(place), *(() if target is None else (target,))):
                waiting.setdefault(part, []).append(place)
        pending = list(self.nodes)
        while pending:
            place = pending.pop()
            if place not in ends and self._ends(place, ends):
                ends.add(place)
                pending += waiting.get(place, ())
        for place in self.nodes:
            if place not in ends:
                self._refuse(
                    place, ("the schema refers to itself endlessly, so no finite document matches")
                )

    def refuse_intersections(self) -> None:
        """Raise InvalidRequest for a schema in which a string must match too many patterns at once.

        This can be caused by `allOf`, or by a reference with other keywords next to it.
        """
        patterns = {place: own for place in self.nodes if (own := self._patterns(place))}
        if len(set[str]().union(*patterns.values())) <= MAX_INTERSECTED:
            return
        looked = 0
        for start, node in self.nodes.items():
            if not isinstance(node, dict) or not {"allOf", "$ref"} & node.keys():
                continue
            wanted: dict[Place, set[str]] = {}  # patterns by location within a document
            pending: list[tuple[Place, Place]] = [(start, ())]
            seen = set(pending)
            while pending:
                place, at = pending.pop()
                looked += 1
                here = wanted.setdefault(at, set())
                here |= patterns.get(place, set())
                if len(here) > MAX_INTERSECTED or looked > _MAX_MERGED:
                    self._refuse(
                        (*start, "allOf" if "allOf" in node else "$ref"),
                        f"a string would have to match more than {MAX_INTERSECTED} patterns at "
                        "once, or too many schemas are combined: use fewer",
                    )
                for part, step in self._merged(place):
                    inner = (*at, *step)
                    if len(inner) <= 2 * MAX_SCHEMA_DEPTH and (part, inner) not in seen:
                        seen.add((part, inner))
                        pending.append((part, inner))

    def _patterns(self, place: Place) -> set[str]:
        """Return the patterns that the schema at `place` itself requires a string to match."""
        node = self.nodes[place]
        keys = ("pattern", "format") if isinstance(node, dict) else ()
        return {f"{key} {node[key]}" for key in keys if key in node}

    def _merged(self, place: Place) -> Iterator[tuple[Place, Place]]:
        """Yield the schemas within the schema at `place`, and the target of its reference.

        Each is yielded with the location of the document that it applies to, relative to this
        schema's document.
        """
        for part in self.children(place):
            step = part[len(place) :]
            if step[0] not in _DEFINED:
                yield part, () if step[0] in _SAME else step
        if (target := self.target(place)) is not None:
            yield target, ()

    def reword(self) -> None:
        """Replace keywords that the library does not support with equivalent ones."""
        references = [str(n.get("$ref")) for n in self.nodes.values() if isinstance(n, dict)]
        for place, node in self.nodes.items():
            if not isinstance(node, dict):
                continue
            if node.get("format") not in _FORMATS:  # an annotation in JSON Schema
                node.pop("format", None)
            node.pop("uniqueItems", None)  # it is false, since `_check` rejects true
            if place or "json-schema.org" not in str(node.get("$schema", "")):
                node.pop("$schema", None)
            if (
                "oneOf" in node
                and "anyOf" not in node
                and not any("/oneOf/" in reference for reference in references)
                and self._excludes(place)
            ):
                # Rebuild the dict, to keep the order of keys.
                items = [("anyOf" if key == "oneOf" else key, v) for key, v in node.items()]
                node.clear()
                node.update(items)
        if not any(_combines(node) for node in self.nodes.values()):
            self._close()

    def _close(self) -> None:
        """Forbid additional properties, unless the schema specifies them.

        A document that matches the closed schema also matches the original. Otherwise, a model
        could invent names endlessly, and a client that parses into a class cannot use them.
        """
        for node in self.nodes.values():
            if isinstance(node, dict) and "properties" in node:
                node.setdefault("additionalProperties", False)

    def _visit(self, start: Place) -> None:
        pending = [start]
        while pending:
            place = pending.pop()
            if place in self.nodes:
                continue
            node = self.root
            for key in place:
                node = node[key]
            self.nodes[place] = node
            if len(self.nodes) > MAX_SCHEMAS:
                self._refuse(
                    (), f"the schema contains more than {MAX_SCHEMAS} schemas: make it smaller"
                )
            self._check(place, node)
            pending += reversed(list(self.children(place)))

    def _check(self, place: Place, node: Any) -> None:
        if not isinstance(node, dict | bool):
            self._refuse(place, "expected a schema: an object, true or false")
        depth = sum(key in (*_ONE, *_LIST, *_MAP) for key in place)
        if depth > MAX_SCHEMA_DEPTH:
            self._refuse(place, f"schemas are nested {depth} deep; the limit is {MAX_SCHEMA_DEPTH}")
        for key, value in node.items() if isinstance(node, dict) else ():
            if key in _UNSUPPORTED or (key == "uniqueItems" and value is True):
                self._refuse((*place, key), "this keyword is not supported: omit it", True)
            if key in _KINDS and not _is_kind(_KINDS[key], value):
                self._refuse((*place, key), f"expected {_KINDS[key]}")
            if key == "$id" and place:
                self._refuse((*place, key), "only the root of a schema may have an $id", True)
            if key == "type" and not _is_type(value):
                self._refuse(
                    (*place, key), f"expected one or several of {', '.join(sorted(_TYPES))}"
                )
        if isinstance(node, dict):
            self._count(place, node)

    def _count(self, place: Place, node: dict[str, Any]) -> None:
        self._properties += len(node.get("properties", ()))
        self._values += len(node.get("enum", ()))
        for count, most, key in (
            (self._properties, MAX_PROPERTIES, "properties"),
            (self._values, MAX_ENUM_VALUES, "enum"),
        ):
            if count > most:
                what = "properties" if key == "properties" else "values of enums"
                self._refuse((*place, key), f"the schema has more than {most} {what}")
        if "multipleOf" in node:
            step = Fraction(str(node["multipleOf"]))
            if step <= 0:
                self._refuse((*place, "multipleOf"), "expected a number above 0")
            self._multiple = math.lcm(self._multiple, step.numerator)
            if self._multiple > MAX_MULTIPLE:
                self._refuse(
                    (*place, "multipleOf"),
                    f"the least common multiple of every multipleOf is above {MAX_MULTIPLE}",
                )

    def _ends(self, place: Place, ends: set[Place]) -> bool:
        """Return True if a finite document can satisfy the schema at `place`.

        ends: the schemas for which this is already known.
        """
        node = self.nodes[place]
        if isinstance(node, bool):
            return True
        target = self.target(place)
        if target is not None and target not in ends:
            return False
        for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            if key in node and not enough(
                (*place, key, index) in ends for index in range(len(node[key]))
            ):
                return False
        if not {"object", "array"} >= {*_list(node.get("type", "null"))}:
            return True  # a value without children is allowed
        if "enum" in node or "const" in node:
            return True
        needs = [
            (*place, "properties", name)
            for name in node.get("required", ())
            if name in node.get("properties", ())
        ]
        if least := int(node.get("minItems", 0)):
            first = node.get("prefixItems", ())
            needs += [(*place, "prefixItems", index) for index in range(len(first))][:least]
            if isinstance(node.get("items"), dict) and least > len(first):
                needs.append((*place, "items"))
        kinds = _list(node["type"])
        return set(needs) <= ends or (
            "array" in kinds and "object" in kinds and not node.get("minItems")
        )

    def _excludes(self, place: Place) -> bool:
        """Return True if no document can satisfy more than one branch of the `oneOf` at `place`."""
        branches = [
            self._resolved((*place, "oneOf", index))
            for index in range(len(self.nodes[place]["oneOf"]))
        ]
        return len(branches) <= _MAX_BRANCHES and all(
            self._disjoint(branches[i], branches[j]) for i in range(len(branches)) for j in range(i)
        )

    def _disjoint(self, one: Place, other: Place, deep: bool = True) -> bool:
        """Return True if two schemas are disjoint by their types, their values, or (with `deep`) a
        property that both require, with disjoint schemas.
        """
        a, b = self.nodes[one], self.nodes[other]
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return a is False or b is False
        if not _types(a) & _types(b):
            return True
        values = _values(a), _values(b)
        if values[0] is not None and values[1] is not None and not values[0] & values[1]:
            return True
        if not deep or not a.get("type") == b.get("type") == "object":
            return False
        shared = {*a.get("required", ())} & {*b.get("required", ())}
        return any(
            self._disjoint(
                self._resolved((*one, "properties", name)),
                self._resolved((*other, "properties", name)),
                deep=False,
            )
            for name in shared
            if name in a.get("properties", ()) and name in b.get("properties", ())
        )

    def _resolved(self, place: Place) -> Place:
        """Return the location at the end of a chain of references."""
        seen = {place}
        while (target := self.target(place)) is not None and target not in seen:
            seen.add(target)
            place = target
        return place

    def _refuse(self, place: Place, why: str, unsupported: bool = False) -> None:
        where = place_name(self._param, place)
        raise InvalidRequest(
            f"{where}: {why}", where, "unsupported_parameter" if unsupported else None
        )


def _combines(node: Any) -> bool:
    """Return True if one value must satisfy several schemas, or must have more properties than
    `properties` names.

    Then a property that one schema does not name may belong to another.
    """
    if not isinstance(node, dict):
        return False
    named = node.get("properties", {})
    holders = sum(key in node for key in ("properties", "anyOf", "oneOf", "$ref", "enum", "const"))
    return (
        holders + len(node.get("allOf", ())) > 1
        or not {*node.get("required", ())} <= {*named}
        or node.get("minProperties", 0) > len(named)
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _types(node: Mapping[str, Any]) -> set[str]:
    kinds = {*_list(node.get("type", [*_TYPES]))}
    return kinds | {"integer"} if "number" in kinds else kinds


def _values(node: Mapping[str, Any]) -> set[str] | None:
    """Return the documents that `enum` or `const` allow, or `None` if there is neither.

    They are in a canonical form, so that equal documents compare as equal.
    """
    if "const" not in node and "enum" not in node:
        return None
    return {_canonical(value) for value in ([node["const"]] if "const" in node else node["enum"])}


def _canonical(value: Any) -> str:
    def level(each: Any) -> Any:
        if isinstance(each, dict):
            return {key: level(inner) for key, inner in each.items()}
        if isinstance(each, list):
            return [level(inner) for inner in each]
        return each if isinstance(each, bool | str) or each is None else str(Fraction(str(each)))

    return json.dumps([type(value) is str, level(value)], sort_keys=True)


def _is_kind(kind: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "a number":
            return number
        case "a whole number of at least 0":
            return number and value >= 0 and value == int(value)
        case "an object of schemas":
            return isinstance(value, dict)
        case "a list of schemas":
            return isinstance(value, list)
        case "a list of schemas that is not empty" | "a list that is not empty":
            return isinstance(value, list) and bool(value)
        case "a list of names":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "a string":
            return isinstance(value, str)
    return isinstance(value, bool)


def _is_type(value: Any) -> bool:
    kinds = _list(value)
    return bool(kinds) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)


def subschemas(schema: Any) -> Iterator[tuple[Place, Any]]:
    """Yield each schema within `schema` as an independent schema, inner ones first.

    Pure references come last, and true and false are omitted. `schema` must be a result of
    `prepare_schema`.
    """
    checked = _Checked(schema, "")
    places = sorted(
        (place for place, node in checked.nodes.items() if isinstance(node, dict)),
        key=lambda place: (checked.target(place) is not None, -len(place)),
    )
    for place in places[:_MAX_TRIED]:
        yield place, as_root(schema, place)
