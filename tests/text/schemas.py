"""JSON schemas at random, for tests: nested, enums, references, bounds, limits, unions."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("id", "name", "größe", "a b", 'quo"te', "items", "type", "next", "x/y", "名前")
_PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(foo|bar)+$", "[A-Z]", "^.{0,4}$", "^a?b*c$")
_FORMATS = ("date", "date-time", "time", "uuid", "ipv4", "email", "int32")


class SchemaMaker:
    """Draws one schema after another; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> dict[str, Any]:
        """A schema whose root is mostly an object, with or without definitions."""
        r = self._random
        definitions = {f"d{i}": self._any(2, ()) for i in range(r.randrange(3))}
        names = (*definitions, *(["tree"] if r.random() < 0.3 else []))
        if "tree" in names:
            definitions["tree"] = {
                "type": "object",
                "properties": {
                    "value": self._leaf(),
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        root = self._object(3, names) if r.random() < 0.8 else self._any(3, names)
        return {**root, "$defs": definitions} if definitions else root

    def _any(self, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
        r = self._random
        if names and r.random() < 0.15:
            return {"$ref": f"#/$defs/{r.choice(names)}"}
        if depth == 0 or r.random() < 0.4:
            return self._leaf()
        kind = r.choice(("object", "object", "array", "array", "anyOf", "oneOf", "allOf", "tagged"))
        match kind:
            case "object":
                return self._object(depth - 1, names)
            case "array":
                return self._array(depth - 1, names)
            case "tagged":
                return {"oneOf": [self._tagged(tag, depth - 1, names) for tag in range(3)]}
            case "allOf":
                return {"allOf": [self._integer(), {"minimum": r.randint(-50, 0)}]}
        return {kind: [self._any(depth - 1, names) for _ in range(r.randint(1, 3))]}

    def _tagged(self, tag: int, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
        value = self._random.choice((tag, f"tag{tag}"))
        made = self._object(depth, names)
        made["properties"] = {"kind": {"const": value}, **made["properties"]}
        made["required"] = ["kind", *made["required"]]
        return made

    def _object(self, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
        r = self._random
        chosen = r.sample(_NAMES, r.randint(0, 4))
        made: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth, names) for name in chosen},
            "required": [name for name in chosen if r.random() < 0.7],
        }
        if r.random() < 0.7:
            made["additionalProperties"] = False
        elif r.random() < 0.5:
            made["additionalProperties"] = self._leaf()
        if r.random() < 0.05:
            made["maxProperties"] = r.randint(0, 5)
        if r.random() < 0.03:
            made[r.choice(("patternProperties", "dependentRequired"))] = {}
        return made

    def _array(self, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
        r = self._random
        made: dict[str, Any] = {"type": "array", "items": self._any(depth, names)}
        if r.random() < 0.6:
            made["minItems"] = r.randint(0, 3)
        if r.random() < 0.6:
            made["maxItems"] = made.get("minItems", 0) + r.randint(0, 3)
        if r.random() < 0.15:
            made["prefixItems"] = [self._leaf() for _ in range(r.randint(1, 2))]
        if r.random() < 0.05:
            made["uniqueItems"] = r.random() < 0.5
        return made

    def _leaf(self) -> dict[str, Any]:
        r = self._random
        match r.choice(("string", "string", "integer", "number", "enum", "const", "plain")):
            case "string":
                return self._string()
            case "integer":
                return self._integer()
            case "number":
                least = round(r.uniform(-100, 100), r.randint(0, 3))
                return {"type": "number", "minimum": least} | (
                    {"exclusiveMaximum": round(least + r.uniform(1, 50), 2)}
                    if r.random() < 0.7
                    else {}
                )
            case "enum":
                values = ["red", "grün", 'a"b', "", 1, -2.5, None, True, {"k": [1]}, "\n"]
                return {"enum": r.sample(values, r.randint(1, 4))}
            case "const":
                return {"const": r.choice(("fixed", 7, None, [1, "two"], {"a": None}))}
        return {"type": r.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"]))}

    def _string(self) -> dict[str, Any]:
        r = self._random
        made: dict[str, Any] = {"type": "string"}
        match r.choice(("free", "length", "pattern", "format")):
            case "length":
                made["minLength"] = r.randint(0, 4)
                made["maxLength"] = made["minLength"] + r.randint(0, 6)
            case "pattern":
                made["pattern"] = r.choice(_PATTERNS)
            case "format":
                made["format"] = r.choice(_FORMATS)
        return made

    def _integer(self) -> dict[str, Any]:
        r = self._random
        least = r.randint(-1000, 1000)
        made: dict[str, Any] = {"type": "integer", "minimum": least}
        if r.random() < 0.7:
            made["maximum"] = least + r.randint(0, 500)
        if r.random() < 0.2:
            made["multipleOf"] = r.choice((1, 2, 3, 10))
        return made
