"""Values that a request carries for plugins. Shared code looks them up by type."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar


class Extra(Protocol):
    """A value of a plugin. NAME is the plugin's name, optionally followed by a dot and the value's
    own.
    """

    NAME: ClassVar[str]


E = TypeVar("E", bound=Extra)
Extras = tuple[Extra, ...]
"""At most one value of each type."""


def find_extra(extras: Extras, kind: type[E]) -> E | None:
    """Return the value of this type, or None if there is none."""
    return next((each for each in extras if isinstance(each, kind)), None)


def extras_of(*given: Extra | None) -> Extras:
    """Return the arguments without None."""
    return tuple(each for each in given if each is not None)


def with_extra(extras: Extras, value: Extra) -> Extras:
    """Return extras with `value` added, which replaces another of its type."""
    return (*(each for each in extras if type(each) is not type(value)), value)
