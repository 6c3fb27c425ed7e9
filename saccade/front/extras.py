"""Values of plugins that are attached to a request. Shared code finds them by type."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar


class Extra(Protocol):
    """A value of a plugin. NAME is the plugin's name, optionally followed by a dot and a name for
    the value.
    """

    NAME: ClassVar[str]


E = TypeVar("E", bound=Extra)
Extras = tuple[Extra, ...]
"""A tuple with at most one value of each type."""


def find_extra(extras: Extras, kind: type[E]) -> E | None:
    """Return the value of type `kind`, or None if there is none."""
    return next((each for each in extras if isinstance(each, kind)), None)


def extras_of(*given: Extra | None) -> Extras:
    """Return those arguments that are not None."""
    return tuple(each for each in given if each is not None)


def with_extra(extras: Extras, value: Extra) -> Extras:
    """Return the extras with `value` added. It replaces a value of the same type."""
    return (*(each for each in extras if type(each) is not type(value)), value)
