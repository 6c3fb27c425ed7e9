"""The parts of a grammar that combines several grammars."""

from __future__ import annotations

import json
from typing import Any

from saccade.text.grammar.constraint import AS_DUMPED, Spacing

Part = dict[str, Any]
"""A grammar with a name: {"name", "json_schema"} or {"name", "lark_grammar"}. Lark grammars refer
to other parts as @name.
"""


def schema_part(name: str, schema: Any, spacing: Spacing = AS_DUMPED) -> Part:
    """Return a part that matches JSON documents of `schema`, which `prepare_schema` has checked."""
    if not isinstance(schema, dict):
        schema = {} if schema else {"allOf": [False]}
    return {"name": name, "json_schema": {**schema, "x-guidance": spacing.options()}}


def lark_part(name: str, lark: str) -> Part:
    """Return a part that matches what the rule `start` of a Lark grammar does."""
    return {"name": name, "lark_grammar": lark}


def quoted(text: str) -> str:
    """Return `text` as a Lark string, whose syntax is that of JSON except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
