"""Grammars of formats in which each argument is written separately after its name. Strings are
verbatim. Other values are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from saccade.core.errors import InvalidRequest
from saccade.text.grammar.call_grammar import TaggedCalls, ValueParts, as_object
from saccade.text.grammar.parts import quoted, schema_part
from saccade.text.grammar.schema_types import allowed_types, as_root, place_name
from saccade.text.grammar.tools import Tool

_REFERENCE = '"$ref"'


class NamedArguments(TaggedCalls):
    """Builds the rules of calls whose arguments have the order of their schema. Optional ones may
    be omitted.

    For strings, `enum` and `const` are enforced, but no other restrictions.
    """

    def around_call(self, name: str) -> tuple[str, list[str]]:
        """Return the term before the arguments of a call, and the terms after them. name: the
        tool's name.
        """
        raise NotImplementedError

    def around_value(self, name: str) -> tuple[str, str]:
        """Return the terms before and after the value of the argument `name`."""
        raise NotImplementedError

    def text_rules(self, rule: str, head: str, tail: str) -> list[str]:
        """Return rules for verbatim text. rule: the first rule's name. head, tail: terms before and
        after the text.
        """
        return [f"{rule}: {head} {rule}_text", f"{rule}_text[suffix={tail}]: /(?s:.*)/"]

    def tool_rules(self, index: int, tool: Tool, schema: Any, parts: ValueParts) -> list[str]:
        object_ = as_object(schema)
        properties: Mapping[str, Any] = object_.get("properties", {})
        body, rules = [], []
        for number, (name, inner) in enumerate(properties.items()):
            if set(name) & set("<>\r\n") or not name.strip():
                where = place_name(tool.param, ("properties", name))
                raise InvalidRequest(f"{where}: the model cannot write this name in a call", where)
            rule = f"p_{index}_{number}"
            head, tail = self.around_value(name)
            values = _string_values(inner)
            if values is not None:
                texts = f"({' | '.join(quoted(each) for each in values if each)})"
                texts = texts.replace("()", "") + ("?" if "" in values and any(values) else "")
                rules.append(f"{rule}: {head} {texts} {tail}")
            elif "string" in allowed_types(inner, object_):
                rules += self.text_rules(rule, head, tail)
            else:
                refers = _REFERENCE in json.dumps(inner)
                alone = as_root(schema, ("properties", name)) if refers else inner
                parts.add(schema_part(f"value_{index}_{number}", alone))
                rules.append(f"{rule}: {head} @value_{index}_{number} {tail}")
            body.append(rule if name in object_.get("required", ()) else f"{rule}?")
        before, behind = self.around_call(tool.name)
        return [" ".join([f"tool_{index}: {before}", *body, *behind]), *rules]


def _string_values(schema: Any) -> list[str] | None:
    """Return the strings that an `enum` or `const` allows, or `None` if other values are
    allowed.
    """
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return values
    return None
