"""The types of fields in action formats: points in various formats, keys, strings, and amounts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.core.errors import InvalidRequest
from saccade.plugins.computer.action import MAX_PIXELS, NOTCH, Action, Point
from saccade.plugins.computer.keys import Spelling, ours, read_chord, spelt
from saccade.plugins.computer.screen import Axis, Screen
from saccade.plugins.computer.vocabulary import Given, Schemas

MAX_SCROLLED = 100 * NOTCH
MAX_SECONDS = 3600
MAX_REPEATED = 100
MAX_KEYS = 16
MAX_TEXT = 100_000
MAX_POINTS = 1000
"""Maximum points of a drag."""
_POINT = re.compile(r"\D*(\d{1,5})\D+(\d{1,5})\D*")
_KEY = r"[!-&(-*,-\[\]-~]{1,16}"
"""A key in a chord, without quotes, backslashes, or the characters that join keys."""
_PATH = frozenset({"path"})


def fault(place: str, key: str, expected: str, got: object) -> InvalidRequest:
    """Return the error for an invalid value."""
    where = f"{place}.{key}"
    return InvalidRequest(f"{where}: expected {expected}, got {str(got)[:100]!r}", where)


def coordinate(value: object, place: str, key: str) -> int:
    """Parse a coordinate. Raises InvalidRequest if it exceeds the size of the largest supported
    screen.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PIXELS:
        raise fault(place, key, f"a whole number from 0 to {MAX_PIXELS}", value)
    return value


def _bounded(axis: Axis) -> Schemas:
    return {"type": "integer", "minimum": 0, "maximum": axis.last}


def _numbers(given: Given, place: str, key: str, shape: str) -> list[int]:
    values, count = given.get(key), shape.count(",") + 1
    if not isinstance(values, list | tuple) or len(values) != count:
        raise fault(place, key, shape, values)
    return [coordinate(each, place, key) for each in values]


# ---- points


@dataclass(frozen=True, slots=True)
class PointPair:
    """A point as [x, y]."""

    key: str
    required: bool = True
    uses = _PATH

    def read(self, given: Given, place: str) -> dict[str, Any]:
        if given.get(self.key) is None and not self.required:
            return {}
        x, y = _numbers(given, place, self.key, "[x, y]")
        return {"path": ((x, y),)}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        if not points:
            return None if self.required else {}
        return {self.key: [*points.pop(0)]}

    def schemas(self, screen: Screen) -> Schemas:
        sides = [_bounded(screen.x), _bounded(screen.y)]
        shape = {"type": "array", "prefixItems": sides, "items": False}
        return {self.key: {**shape, "minItems": 2, "maxItems": 2}}

    def sample(self) -> dict[str, Any]:
        return {"path": ((0, 0),)}


@dataclass(frozen=True, slots=True)
class Flat:
    """A point as two keys, x and y."""

    required: bool = True
    uses = _PATH

    def read(self, given: Given, place: str) -> dict[str, Any]:
        return {"path": (tuple(coordinate(given.get(key), place, key) for key in "xy"),)}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        return dict(zip("xy", points.pop(0), strict=True)) if points else None

    def schemas(self, screen: Screen) -> Schemas:
        return {"x": _bounded(screen.x), "y": _bounded(screen.y)}

    def sample(self) -> dict[str, Any]:
        return {"path": ((0, 0),)}


@dataclass(frozen=True, slots=True)
class Points:
    """All points of a path, as a list of {x, y}."""

    key: str
    required: bool = True
    uses = _PATH

    def read(self, given: Given, place: str) -> dict[str, Any]:
        values = given.get(self.key)
        if not isinstance(values, list | tuple) or not 1 <= len(values) <= MAX_POINTS:
            raise fault(place, self.key, f"1 to {MAX_POINTS} points", values)
        return {"path": tuple(self._point(each, place, i) for i, each in enumerate(values))}

    def _point(self, value: object, place: str, index: int) -> Point:
        where = f"{place}.{self.key}[{index}]"
        point = value if isinstance(value, Mapping) else {}
        return coordinate(point.get("x"), where, "x"), coordinate(point.get("y"), where, "y")

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        taken, points[:] = [*points], []
        return {self.key: [{"x": x, "y": y} for x, y in taken]} if taken else None

    def schemas(self, screen: Screen) -> Schemas:
        point = {
            "type": "object",
            "properties": Flat().schemas(screen),
            "required": ["x", "y"],
            "additionalProperties": False,
        }
        return {self.key: {"type": "array", "items": point, "minItems": 2, "maxItems": 16}}

    def sample(self) -> dict[str, Any]:
        return {"path": ((0, 0), (0, 0))}


@dataclass(frozen=True, slots=True)
class Region:
    """Two corners as [x0, y0, x1, y1]."""

    key: str
    required: bool = True
    uses = _PATH

    def read(self, given: Given, place: str) -> dict[str, Any]:
        x0, y0, x1, y1 = _numbers(given, place, self.key, "[x0, y0, x1, y1]")
        return {"path": ((x0, y0), (x1, y1))}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        if len(points) < 2:
            return None
        return {self.key: [*points.pop(0), *points.pop(0)]}

    def schemas(self, screen: Screen) -> Schemas:
        sides = [_bounded(screen.x), _bounded(screen.y)] * 2
        shape = {"type": "array", "prefixItems": sides, "items": False}
        return {self.key: {**shape, "minItems": 4, "maxItems": 4}}

    def sample(self) -> dict[str, Any]:
        return {"path": ((0, 0), (0, 0))}


@dataclass(frozen=True, slots=True)
class Target:
    """A point, or a page element, as an object with a type.

    element: whether page elements are allowed.
    """

    key: str
    element: bool = True
    required: bool = True

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"path", "target"}) if self.element else _PATH

    def read(self, given: Given, place: str) -> dict[str, Any]:
        value, where = given.get(self.key), f"{place}.{self.key}"
        match value:
            case {"type": "coordinate"}:
                return Flat().read(given[self.key], where)
            case {"type": "ref", "ref": str(target)} if self.element and target:
                return {"target": target}
        shape = '{"type": "coordinate", "x", "y"}'
        shape += ' or {"type": "ref", "ref"}' if self.element else ""
        raise fault(place, self.key, shape, value)

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:
        if action.target and self.element:
            return {self.key: {"type": "ref", "ref": action.target}}
        if not points:
            return None
        x, y = points.pop(0)
        return {self.key: {"type": "coordinate", "x": x, "y": y}}

    def schemas(self, screen: Screen) -> Schemas:
        properties = {"type": {"const": "coordinate"}, **Flat().schemas(screen)}
        shape = {"type": "object", "properties": properties, "required": [*properties]}
        return {self.key: {**shape, "additionalProperties": False}}

    def sample(self) -> dict[str, Any]:
        return {"path": ((0, 0),)}


@dataclass(frozen=True, slots=True)
class Reference:
    """A page element, identified by its reference."""

    key: str
    required: bool = True
    uses = frozenset({"target"})

    def read(self, given: Given, place: str) -> dict[str, Any]:
        value = given.get(self.key)
        if not isinstance(value, str) or not value:
            raise fault(place, self.key, "an element's reference", value)
        return {"target": value}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        return {self.key: action.target} if action.target else None

    def schemas(self, screen: Screen) -> Schemas:  # noqa: ARG002
        return {self.key: {"type": "string", "pattern": "^[!-~]{1,64}$"}}

    def sample(self) -> dict[str, Any]:
        return {"target": "ref_1"}


@dataclass(frozen=True, slots=True)
class WrittenPoint:
    """A point as text: "(x,y)"."""

    key: str
    required: bool = True
    uses = _PATH

    def read(self, given: Given, place: str) -> dict[str, Any]:
        found = _POINT.fullmatch(str(given.get(self.key)))
        if found is None:
            raise fault(place, self.key, '"(x,y)"', given.get(self.key))
        return {"path": ((int(found[1]), int(found[2])),)}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        if not points:
            return None
        x, y = points.pop(0)
        return {self.key: f"({x},{y})"}

    def schemas(self, screen: Screen) -> Schemas:
        x, y = at_most(screen.x.last), at_most(screen.y.last)
        return {self.key: {"type": "string", "pattern": rf"^\(({x}),({y})\)$"}}

    def sample(self) -> dict[str, Any]:
        return {"path": ((0, 0),)}


def at_most(most: int) -> str:
    """Return a regular expression that matches the integers from 0 to `most`.

    An integer with the same number of digits is smaller if its first different digit is smaller.
    """
    digits, found = str(most), [str(most)]
    for at, digit in enumerate(digits):
        least = 1 if at == 0 and len(digits) > 1 else 0
        if int(digit) > least:
            found.append(
                f"{digits[:at]}[{least}-{int(digit) - 1}]{'[0-9]' * (len(digits) - at - 1)}"
            )
    for length in range(1, len(digits)):
        found.append("[0-9]" if length == 1 else f"[1-9]{'[0-9]' * (length - 1)}")
    return "|".join(found)


# ---- other fields


@dataclass(frozen=True, slots=True)
class Texts:
    """The value of one attribute, as a string."""

    key: str
    attribute: str
    required: bool = True
    about: str = ""

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({self.attribute})

    def read(self, given: Given, place: str) -> dict[str, Any]:
        value = given.get(self.key)
        if value is None and not self.required:
            return {}
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise fault(place, self.key, f"a text of at most {MAX_TEXT} characters", value)
        return {self.attribute: value}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        value = getattr(action, self.attribute)
        return {self.key: value} if value or self.required else {}

    def schemas(self, screen: Screen) -> Schemas:  # noqa: ARG002
        return {self.key: {"type": "string"}}

    def sample(self) -> dict[str, Any]:
        return {self.attribute: "a"} if self.required else {}


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several values.

    values: maps the format's values to Saccade's.
    """

    key: str
    attribute: str
    values: Mapping[str, Any]
    required: bool = True

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({self.attribute})

    def read(self, given: Given, place: str) -> dict[str, Any]:
        value = given.get(self.key)
        if value is None and not self.required:
            return {}
        if not isinstance(value, str) or value not in self.values:
            raise fault(place, self.key, f"one of {', '.join(self.values)}", value)
        return {self.attribute: self.values[value]}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        ours = getattr(action, self.attribute)
        theirs = next((each for each, value in self.values.items() if value == ours), None)
        return None if theirs is None else {self.key: theirs}

    def schemas(self, screen: Screen) -> Schemas:  # noqa: ARG002
        return {self.key: {"enum": [*self.values]}}

    def sample(self) -> dict[str, Any]:
        return {self.attribute: next(iter(self.values.values()))}


@dataclass(frozen=True, slots=True)
class Chord:
    """Keys pressed together, as a list or as one string.

    joint: the separator between keys in a string.
    """

    key: str
    spelling: Spelling
    joint: str = ""
    required: bool = True
    uses = frozenset({"keys"})

    def read(self, given: Given, place: str) -> dict[str, Any]:
        value = given.get(self.key)
        if value is None and not self.required:
            return {}
        if isinstance(value, str) and 0 < len(value) <= MAX_TEXT and self.joint:
            keys = read_chord(value)
        elif isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            keys = tuple(map(ours, value))
        else:
            shape = f'keys as in "ctrl{self.joint}c"' if self.joint else "a list of keys"
            raise fault(place, self.key, shape, value)
        if not 1 <= len(keys) <= MAX_KEYS or not all(0 < len(each) <= MAX_KEYS for each in keys):
            raise fault(place, self.key, f"1 to {MAX_KEYS} keys, by their names", value)
        return {"keys": keys}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        if not action.keys:
            return None if self.required else {}
        keys = [spelt(each, self.spelling) for each in action.keys]
        return {self.key: self.joint.join(keys) if self.joint else keys}

    def schemas(self, screen: Screen) -> Schemas:  # noqa: ARG002
        if self.joint:
            more = f"({re.escape(self.joint)}{_KEY}){{0,3}}"
            return {self.key: {"type": "string", "pattern": f"^{_KEY}{more}$"}}
        name = {"type": "string", "pattern": r"^[ -~]{1,16}$"}
        return {self.key: {"type": "array", "items": name, "minItems": 1, "maxItems": 4}}

    def sample(self) -> dict[str, Any]:
        return {"keys": ("a",)} if self.required else {}


@dataclass(frozen=True, slots=True)
class Amount:
    """A number from `least` to `most`.

    whole: whether it must be an integer.
    """

    key: str
    attribute: str
    most: int
    whole: bool = True
    required: bool = True
    least: int = 0

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({self.attribute})

    def read(self, given: Given, place: str) -> dict[str, Any]:
        value = given.get(self.key)
        if value is None and not self.required:
            return {}
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fault(place, self.key, "a number", value)
        if not self.least <= value <= self.most:
            raise fault(place, self.key, f"a number from {self.least} to {self.most}", value)
        return {self.attribute: int(value) if value == int(value) else value}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        value = getattr(action, self.attribute)
        if value == 1 and not self.required:
            return {}
        return {self.key: max(self.least, round(value)) if self.whole else value}

    def schemas(self, screen: Screen) -> Schemas:  # noqa: ARG002
        kind = "integer" if self.whole else "number"
        return {self.key: {"type": kind, "minimum": max(1, self.least), "maximum": self.most}}

    def sample(self) -> dict[str, Any]:
        return {self.attribute: 1}


_WAYS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


@dataclass(frozen=True, slots=True)
class Wheel:
    """Scrolling by a direction and a number of notches, which is `notches` by default."""

    direction: str
    amount: str = ""
    notches: int = 3
    required: bool = True
    uses = frozenset({"scroll"})

    def read(self, given: Given, place: str) -> dict[str, Any]:
        way = given.get(self.direction)
        if not isinstance(way, str) or way not in _WAYS:
            raise fault(place, self.direction, f"one of {', '.join(_WAYS)}", way)
        notches = given.get(self.amount, self.notches) if self.amount else self.notches
        most = MAX_SCROLLED // NOTCH
        if isinstance(notches, bool) or not isinstance(notches, int) or not 0 <= notches <= most:
            raise fault(place, self.amount, f"a whole number from 0 to {most}", notches)
        x, y = _WAYS[way]
        return {"scroll": (x * notches * NOTCH, y * notches * NOTCH)}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        right, down = action.scroll
        if right and down:
            return None
        length = right or down
        way = ("left" if right < 0 else "right") if right else ("up" if down < 0 else "down")
        notches = max(1, round(abs(length) / NOTCH)) if length else 0
        return {self.direction: way, **({self.amount: notches} if self.amount else {})}

    def schemas(self, screen: Screen) -> Schemas:  # noqa: ARG002
        amount = {"type": "integer", "minimum": 1, "maximum": 50}
        return {
            self.direction: {"enum": [*_WAYS]},
            **({self.amount: amount} if self.amount else {}),
        }

    def sample(self) -> dict[str, Any]:
        return {"scroll": (0, self.notches * NOTCH)}


@dataclass(frozen=True, slots=True)
class Scrolled:
    """Scrolling by pixels.

    keys: the axis of each key: 0 scrolls to the right, 1 scrolls down.
    sign: -1 if positive values scroll up.
    """

    keys: Mapping[str, int] = field(default_factory=dict)
    sign: int = 1
    required: bool = True
    uses = frozenset({"scroll"})

    def read(self, given: Given, place: str) -> dict[str, Any]:
        scroll = [0, 0]
        for key, axis in self.keys.items():
            value = given.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise fault(place, key, "a number of pixels", value)
            if not abs(value) <= MAX_SCROLLED:
                raise fault(place, key, f"at most {MAX_SCROLLED} pixels", value)
            scroll[axis] = self._signed(axis) * round(value)
        return {"scroll": tuple(scroll)}

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:  # noqa: ARG002
        if any(action.scroll[axis] for axis in (0, 1) if axis not in self.keys.values()):
            return None
        return {key: self._signed(axis) * action.scroll[axis] for key, axis in self.keys.items()}

    def schemas(self, screen: Screen) -> Schemas:  # noqa: ARG002
        bounds = {"type": "integer", "minimum": -MAX_SCROLLED, "maximum": MAX_SCROLLED}
        return dict.fromkeys(self.keys, bounds)

    def sample(self) -> dict[str, Any]:
        axis = max(self.keys.values())
        return {"scroll": (NOTCH, 0) if axis == 0 else (0, NOTCH)}

    def _signed(self, axis: int) -> int:
        return self.sign if axis else 1
