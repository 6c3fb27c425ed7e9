"""Bounds that options must keep. Every refusal names the option as the command line has it."""

from __future__ import annotations

from collections.abc import Callable

from saccade.core.errors import ConfigError
from saccade.core.tuning import option, setting

MOST_IMAGE_WORKERS = 240
"""A message that passes descriptors holds 253: one of each worker, and a few more."""


def at_least(bound: float, options: object, *names: str) -> None:
    """Raise ConfigError if a field is below `bound`. Unset values pass."""
    _check(options, names, lambda value: value >= bound, f"at least {bound}")


def at_most(bound: float, options: object, *names: str) -> None:
    """Raise ConfigError if a field is above `bound`."""
    _check(options, names, lambda value: value <= bound, f"at most {bound}")


def above(bound: float, options: object, *names: str) -> None:
    """Raise ConfigError unless each field is above `bound`."""
    _check(options, names, lambda value: value > bound, f"above {bound}")


def filled(options: object, *names: str) -> None:
    """Raise ConfigError if a list is empty."""
    for name in names:
        if not getattr(options, name):
            raise ConfigError(f"{option(name)}: name at least one")


def named(options: object, *names: str) -> None:
    """Raise ConfigError if a list holds an empty text, as an unset variable makes one."""
    for name in names:
        if "" in getattr(options, name):
            raise ConfigError(f"{option(name)} is empty: give a value, or leave the option out")


def _check(
    options: object, names: tuple[str, ...], right: Callable[[float], bool], allowed: str
) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not right(value):
            raise ConfigError(f"{setting(options, name, value)}: must be {allowed}")
