"""The single function with which a model acts, built from the actions that a client declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.plugins.computer.action_format import Words
from saccade.plugins.computer.screen import THOUSANDTHS, Screen

_ANY = Screen.in_thousandths((THOUSANDTHS, THOUSANDTHS))


def parameters(
    words: Words, heading: str, key: str, fields: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return a JSON schema with a property `key` for the action's name, and the properties in
    `fields` that at least one of the available actions has.

    fields: the type and description of each property. In a description, "{}" is replaced with the
    names of the actions that need the property.
    """
    listed = "\n".join(f"* `{name}`: {word.about}" for name, word in words.items())
    properties: dict[str, Any] = {
        key: {"description": f"{heading}\n{listed}", "enum": [*words], "type": "string"}
    }
    for name, (kind, about) in fields.items():
        schemas = {word: each.schema(_ANY) for word, each in words.items()}
        users = [word for word, each in schemas.items() if name in each["properties"]]
        needing = [word for word in users if name in schemas[word]["required"]]
        if users:
            named = " and ".join(f"`{key}={each}`" for each in needing or users)
            properties[name] = {"description": about.format(named), "type": kind}
    return {"properties": properties, "required": [key], "type": "object"}
