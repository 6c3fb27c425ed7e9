"""Action formats of APIs and models, as tables of words.

A `Word` is a type of action with its JSON fields. It can read and write an action and describe
itself as a schema, so that a format is a table without code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

from saccade.core.errors import InvalidRequest
from saccade.plugins.computer.action import Action, Kind, Point
from saccade.plugins.computer.screen import Screen

Given = Mapping[str, Any]
Schemas = dict[str, Any]

_USUAL: Mapping[str, Any] = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory()
    for each in fields(Action)
}
"""The default values of an action's attributes."""
_ALWAYS = frozenset({"kind", "path"})
"""The attributes that every word reads and writes itself."""


class WordField(Protocol):
    """Represents attributes of an action as one or more keys of its JSON.

    Implementations are frozen dataclasses.

    uses: the names of the attributes that it represents.
    required: whether a model must set it.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def uses(self) -> frozenset[str]: ...

    @property
    def required(self) -> bool: ...

    def read(self, given: Given, place: str) -> dict[str, Any]:
        """Return the attributes that the JSON `given` sets, with points under "path".

        place: the path of the JSON in the request.

        Raises InvalidRequest with the key.
        """
        ...

    def write(self, action: Action, points: list[Point]) -> dict[str, Any] | None:
        """Return the keys and values that represent an action, or None if they cannot. Removes the
        points that it uses from `points`.
        """
        ...

    def schemas(self, screen: Screen) -> Schemas:
        """Return the schema of each key. The size of `screen` limits coordinates."""
        ...

    def sample(self) -> dict[str, Any]:
        """Return example values of the attributes that this field represents."""
        ...


@dataclass(frozen=True, slots=True)
class Word:
    """One type of action in a format, with its fields."""

    kind: Kind
    fields: tuple[WordField, ...] = ()
    # attributes that the word implies
    fixed: Mapping[str, Any] = field(default_factory=dict)
    drops: frozenset[str] = frozenset()  # attributes that it ignores, as it cannot represent them
    about: str = ""  # a description for the model

    def read(self, given: Given, place: str) -> Action:
        """Convert JSON to an action. Raises InvalidRequest with the path of the key, which is below
        `place`.
        """
        found: dict[str, Any] = {**self.fixed}
        path: tuple[Point, ...] = ()
        for each in self.fields:
            read = each.read(given, place)
            path += read.pop("path", ())
            found |= read
        return Action(self.kind, path, **found)

    def write(self, action: Action) -> dict[str, Any] | None:
        """Return an action as JSON, or None if this word cannot represent it."""
        if action.kind != self.kind or not all(self._has(name, action) for name in _USUAL):
            return None
        points, told = [*action.path], dict[str, Any]()
        for each in self.fields:
            if (said := each.write(action, points)) is None:
                return None
            told |= said
        return None if points else told

    def sample(self) -> Action:
        """Return an example action."""
        found: dict[str, Any] = {**self.fixed}
        path: tuple[Point, ...] = ()
        for each in self.fields:
            sample = each.sample()
            path += sample.pop("path", ())
            found |= sample
        return Action(self.kind, path, **found)

    def told_by(self, can: Callable[[Word], bool]) -> Word:
        """Return this word without the optional fields that another format cannot represent.

        can: returns whether that format can represent a word.
        """
        kept = tuple(each for each in self.fields if each.required or can(self._needing(each)))
        return self if kept == self.fields else replace(self, fields=kept)

    def _needing(self, field: WordField) -> Word:
        """Return this word with one of its optional fields made required."""
        needed = replace(field, required=True)
        return replace(
            self, fields=tuple(needed if each is field else each for each in self.fields)
        )

    @property
    def points(self) -> bool:
        """True if the action has a position on the screen."""
        return bool(self.sample().path)

    def schema(self, screen: Screen, key: str = "", value: str = "") -> Schemas:
        """Return the schema of the action's JSON. If `key` is set, the schema requires `value`
        under this key.
        """
        properties: Schemas = {key: {"const": value}} if key else {}
        required = [key] if key else []
        for each in self.fields:
            schemas = each.schemas(screen)
            properties |= schemas
            required += [*schemas] if each.required else []
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def _has(self, name: str, action: Action) -> bool:
        """Return True if this word represents, implies or may ignore the attribute `name` of the
        action.
        """
        if name in _ALWAYS or name in self.drops or any(name in each.uses for each in self.fields):
            return True
        value: object = getattr(action, name)
        return bool(value == self.fixed.get(name, _USUAL[name]))


@dataclass(frozen=True, slots=True)
class ClientFunction:
    """A function in a toolset that is not an action.

    schema: the JSON schema of its arguments.
    """

    about: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ActionWords:
    """An action format. Its words, by name, are tried in order."""

    words: Mapping[str, Word]
    # the function whose argument `key` is the word. If empty, each word is a separate function.
    tool: str = ""
    key: str = "action"
    # functions that are not actions, by name
    functions: Mapping[str, ClientFunction] = field(default_factory=dict)

    def names(self, name: str) -> bool:
        """Return True if a call with this name belongs to the format."""
        return name == self.tool if self.tool else name in self.words or name in self.functions

    def read(self, name: str, arguments: Given, place: str) -> Action:
        """Convert a call to an action. Raises InvalidRequest with the location of an error."""
        if name in self.functions and not self.tool:
            return Action("call", name=name, arguments=arguments)
        word: Any = arguments.get(self.key) if self.tool else name
        if not (isinstance(word, str) and word in self.words):
            where = f"{place}.{self.key}" if self.tool else place
            raise InvalidRequest(
                f"{where}: expected one of {', '.join(self.words)}, got {str(word)[:100]!r}", where
            )
        return self.words[word].read(arguments, place)

    def write(self, action: Action) -> tuple[str, dict[str, Any]] | None:
        """Return the name and arguments of the call for an action, or None if no word can represent
        it.
        """
        if action.kind == "call":
            return (action.name, {**action.arguments}) if action.name in self.functions else None
        if (said := self._said(action)) is None:
            return None
        name, told = said
        return (self.tool, {self.key: name, **told}) if self.tool else said

    def word(self, action: Action) -> tuple[str, dict[str, Any]]:
        """Return the name and the fields of the word for an action that was read with this
        format.
        """
        said = self._said(action)
        assert said is not None
        return said

    def _said(self, action: Action) -> tuple[str, dict[str, Any]] | None:
        for name, word in self.words.items():
            if (told := word.write(action)) is not None:
                return name, told
        return None

    def can(self, word: Word) -> bool:
        """Return True if this format can represent a word of another format."""
        action = word.sample()
        return any(self.write(each) is not None for each in placed(action, (0, 0)))


def placed(action: Action, cursor: Point) -> Iterator[Action]:
    """Yield the forms of an action to try: unchanged, then with the cursor's position if it needs a
    position and has none.

    A drag with only one point yields only the form that starts at the cursor.
    """
    if action.kind == "drag" and len(action.path) == 1:
        yield _at(action, (cursor, *action.path))
        return
    yield action
    if not action.path and action.kind in ("click", "scroll", "press", "release", "move"):
        yield _at(action, (cursor,))


def _at(action: Action, path: Sequence[Point]) -> Action:
    values = {name: getattr(action, name) for name in _USUAL}
    return Action(**{**values, "path": tuple(path)})
