"""Finds the format in which a model writes computer-use actions, by the model's family and name.
The formats are in `formats/`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from saccade.plugins.computer import formats
from saccade.plugins.computer.action_format import ActionFormat


def find_action_formats() -> dict[str, ActionFormat]:
    """Return the formats by name, in the order in which they are tried."""
    names = [module.name for module in iter_modules(formats.__path__)]
    found: list[ActionFormat] = [import_module(f"{formats.__name__}.{n}").FORMAT for n in names]
    return {each.name: each for each in sorted(found, key=lambda each: each.order)}


def find_action_format(family: str, model: str) -> ActionFormat:
    """Return the action format of a model. There is always one, since the last format supports all
    models.
    """
    return next(each for each in find_action_formats().values() if each.serves(family, model))
