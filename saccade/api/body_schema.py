"""Parses the fields of a flat JSON object into groups.

The class of a body is a dataclass whose attributes are groups (msgspec Structs, or dataclasses of
groups). The keys of the JSON object are the fields of all groups together. An optional group is
None if the body has none of its fields. Null means that a field is not set.
`front/unread_fields.py` decides about keys that are not in any group. The size of a body is checked
before any object is built.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from saccade.core.errors import InvalidRequest
from saccade.front.fields import Reader, not_json, only, unknown, unsupported
from saccade.front.unread_fields import (
    IGNORED,
    INSTEAD,
    NEUTRAL,
    Neutral,
    is_one_of,
    says_nothing,
)

F = TypeVar("F")

_SLICE = 1 << 20
_NULL = b"null"
_MAX_NEUTRAL = 200
_NEAR = 0.75
"""Minimum similarity, from 0 to 1, of an unknown field's name and a known one to suggest the
latter.
"""
_BASE_LIMIT = 65_536
_PER_TOKEN = 8
"""The maximum number of JSON values in a body is `_BASE_LIMIT`, plus `_PER_TOKEN` for each token of
the context.
"""

_OBJECT: Reader[dict[str, msgspec.Raw]] = Reader(dict[str, msgspec.Raw])


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One key of a body: the group that declares it, and the reader of its value."""

    group: type[msgspec.Struct]
    reader: Reader[Any]
    required: bool


@dataclasses.dataclass(frozen=True, slots=True)
class BodyPart:
    """The class of a body, or of one of its attributes. It is a group unless it has `inner`
    parts.
    """

    name: str
    kind: type[Any]
    optional: bool
    inner: tuple[BodyPart, ...]

    @classmethod
    def of(cls, name: str, hint: Any) -> BodyPart:
        kind = next((each for each in get_args(hint) if each is not NoneType), hint)
        inner: tuple[BodyPart, ...] = ()
        if not issubclass(kind, msgspec.Struct):
            hints = get_type_hints(kind)
            inner = tuple(cls.of(each.name, hints[each.name]) for each in dataclasses.fields(kind))
        return cls(name, kind, kind is not hint, inner)

    @property
    def groups(self) -> list[type[msgspec.Struct]]:
        if not self.inner:
            return [self.kind]
        return [group for each in self.inner for group in each.groups]

    def build(self, values: Mapping[type[msgspec.Struct], dict[str, Any]]) -> Any:
        """Create an instance of `kind`. values: field values by name, for each group."""
        if self.inner:
            return self.kind(**{each.name: each.build(values) for each in self.inner})
        found = values.get(self.kind)
        return None if found is None and self.optional else self.kind(**(found or {}))


class BodySchema(Generic[F]):
    """Parses bodies into instances of one dataclass."""

    def __init__(
        self,
        kind: type[F],
        neutral: Neutral | None = None,
        ignored: Iterable[str] = (),
        most_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """Derive the schema from the dataclass `kind`.

        neutral, ignored: additions to the table in `front/unread_fields.py` for this body.
        most_bytes: maximum size of the JSON of some fields. Longer values are rejected before they
            are parsed.
        """
        self.kind = kind
        self._body = BodyPart.of("", kind)
        self.groups = self._body.groups
        self._fields = {
            field.encode_name: Field(group, Reader(field.type), field.required)
            for group in self.groups
            for field in msgspec.structs.fields(group)
        }
        self.neutral = {**NEUTRAL, **(neutral or {})}
        self.ignored = IGNORED.union(ignored) - self._fields.keys()
        self._most_bytes = most_bytes or {}

    def read(self, body: bytearray, context_length: int) -> F:
        """Parse a body. Raises InvalidRequest that names the field.

        Values that stay undecoded (`msgspec.Raw`) are views of `body`, which must not change until
        they are decoded.
        """
        check_size(body, context_length)
        raws = open_object(body)
        values: dict[type[msgspec.Struct], dict[str, Any]] = {}
        for name, raw in raws.items():
            if name in self.ignored or bytes(memoryview(raw)[:5]) == _NULL:
                continue
            field = self._fields.get(name)
            size, most = len(memoryview(raw)), self._most_bytes.get(name)
            if most is not None and size > most:
                message = f"{name}: {size} bytes; the limit is {most}: make it smaller"
                raise InvalidRequest(message, name)
            if field is not None:
                values.setdefault(field.group, {})[name] = field.reader.json(raw, name)
            else:
                self._check_unread(name, raw)
        for name, field in self._fields.items():
            if field.required and name not in values.get(field.group, ()):
                raise InvalidRequest(
                    f"{name}: this parameter is required", name, "missing_required_parameter"
                )
        request: F = self._body.build(values)
        return request

    def _check_unread(self, name: str, raw: msgspec.Raw) -> None:
        """Raise InvalidRequest for an unknown field, unless its value has no effect."""
        neutral = self.neutral.get(name)
        if len(memoryview(raw)) <= _MAX_NEUTRAL:
            try:
                value = msgspec.json.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise not_json(error, raw, name) from None
            if says_nothing(value) if neutral is None else is_one_of(value, neutral):
                return
        if neutral is None:
            raise unknown(name, self._instead(name))
        if neutral and name not in INSTEAD:
            raise only(name, list(neutral))
        raise unsupported(name, INSTEAD.get(name, ""))

    def _instead(self, name: str) -> str:
        near = difflib.get_close_matches(name[:_MAX_NEUTRAL], self._fields, 1, _NEAR)
        return INSTEAD.get(name) or (f"did you mean {near[0]}?" if near else "")


def open_object(body: bytearray) -> dict[str, msgspec.Raw]:
    """Return the values of a body by key, without decoding them.

    Raises InvalidRequest unless the body is a JSON object.
    """
    return _OBJECT.json(body, "")


def check_size(body: bytearray, context_length: int) -> None:
    """Raise InvalidRequest for a body with more content than any prompt of this context length
    needs.

    Counts values and escaped characters, and releases the GIL meanwhile.
    """
    limit = _BASE_LIMIT + _PER_TOKEN * context_length
    if len(body) <= limit:
        return
    text = np.frombuffer(body, np.uint8)
    slices = [text[at : at + _SLICE] for at in range(0, len(text), _SLICE)]
    num_values = sum(int(np.count_nonzero(each == ord(","))) for each in slices)
    # Some JSON writers escape slashes, which are one in 64 characters of base64.
    escapes = sum(int(np.count_nonzero(each == ord("\\"))) for each in slices) - len(body) // 16
    for count, what in ((num_values, "values"), (escapes, "escaped characters")):
        if count > limit:
            raise InvalidRequest(
                f"This model's maximum context length is {context_length} tokens; the body has "
                f"{count} {what}, more than {limit}: shorten it",
                code="context_length_exceeded",
            )
