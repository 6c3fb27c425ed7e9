"""The text of grammars, as several are put together into one."""

from __future__ import annotations

import json
from typing import Any

from saccade.text.grammar.constraint import AS_DUMPED, Spacing

Part = dict[str, Any]
"""One grammar of several: {"name", "json_schema"} or {"name", "lark_grammar"}; Lark calls the
others @name.
"""


def schema_part(name: str, schema: Any, spacing: Spacing = AS_DUMPED) -> Part:
    """Return a part for documents under `schema`, which `prepare_schema` has checked."""
    if not isinstance(schema, dict):
        schema = {} if schema else {"allOf": [False]}
    return {"name": name, "json_schema": {**schema, "x-guidance": spacing.options()}}


def lark_part(name: str, lark: str) -> Part:
    """Return a part for what a Lark grammar derives from `start`."""
    return {"name": name, "lark_grammar": lark}


def quoted(text: str) -> str:
    """Return `text` as a Lark string. Lark takes JSON's strings except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
