"""Bounds that options must keep.

Every check names the option as the command line has it. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from saccade.core.errors import ConfigError

MOST_IMAGE_WORKERS = 240
"""A nursery is passed a descriptor of each, and a few, with one message, of 253 at most."""


def at_least(bound: float, options: object, *names: str) -> None:
    """Raises ConfigError for one of these fields that is less; None is no value and may stand."""
    _check(options, names, lambda value: value >= bound, f"at least {bound}")


def at_most(bound: float, options: object, *names: str) -> None:
    """The same for one that is more."""
    _check(options, names, lambda value: value <= bound, f"at most {bound}")


def above(bound: float, options: object, *names: str) -> None:
    """The same for one that is not more."""
    _check(options, names, lambda value: value > bound, f"above {bound}")


def filled(options: object, *names: str) -> None:
    """The same for a list without anything in it."""
    for name in names:
        if not getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: name at least one")


def named(options: object, *names: str) -> None:
    """The same for a list with an empty text in it, as an unset variable makes it."""
    for name in names:
        if "" in getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is empty: give a value, or leave the option out"
            )


def _check(
    options: object, names: tuple[str, ...], right: Callable[[float], bool], allowed: str
) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not right(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be {allowed}")
