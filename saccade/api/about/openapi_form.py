"""Changes to `/openapi.json` for client generators: operations get names, groups and summaries,
lists get items, values stay apart as names. Knows nothing of the routes.
"""

from __future__ import annotations

import re
from typing import Any

_METHODS = ("get", "post", "delete")
_EVENTS = "Server-sent events, where the request says stream: each is `data:` and a JSON text."


def finish(document: dict[str, Any], summaries: dict[tuple[str, str], str]) -> None:
    """Complete the document in place. `summaries`: by path and method, where missing."""
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if (operation := methods.get(method)) is not None:
                _name(path, method, operation, summaries)
    _complete(document["components"])


def _name(path: str, method: str, operation: dict[str, Any], summaries: Any) -> None:
    words = re.sub(r"\{(\w+)\}", r"by_\1", path).strip("/").removeprefix("v1/")
    operation["operationId"] = f"{method}_{re.sub(r'[^a-z0-9]+', '_', words.lower())}"
    operation["tags"] = [_tag(path)]
    operation.setdefault("summary", summaries.get((path, method), ""))
    names = re.findall(r"\{(\w+)\}", path)
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]


def _tag(path: str) -> str:
    """Return an operation's group: the part after /v1, or else the server itself."""
    parts = path.strip("/").split("/")
    return parts[1] if parts[0] == "v1" else "server"


def _complete(value: Any) -> None:
    """Give lists their items. Where two values are one name to a generator, keep the first."""
    if isinstance(value, list):
        for each in value:
            _complete(each)
    if not isinstance(value, dict):
        return
    if value.get("type") == "array":
        value.setdefault("items", {})
    if isinstance(value.get("enum"), list):
        names = {re.sub(r"\W", "_", str(each)).lower(): each for each in reversed(value["enum"])}
        value["enum"] = list(reversed(names.values()))
        if all(isinstance(each, bool) for each in value["enum"]):
            value["type"] = "boolean"
            value["const"] = value.pop("enum")[0]
    for each in value.values():
        _complete(each)


def streams(answers: dict[str, Any]) -> dict[str, Any]:
    """Add a stream to an operation's `answers`."""
    answers["200"]["content"]["text/event-stream"] = {
        "schema": {"type": "string", "description": _EVENTS}
    }
    return answers
