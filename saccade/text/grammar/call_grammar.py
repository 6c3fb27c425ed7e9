"""The interface of grammars for tool calls, and Lark rules that several formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from saccade.core.errors import InvalidRequest
from saccade.text.grammar.json_size import extent
from saccade.text.grammar.parts import Part, quoted, schema_part
from saccade.text.grammar.tools import Tool

MAX_CHARACTERS = 524_288
"""Maximum number of characters of all schemas in one grammar, which then takes about a second to
compile. In formats with separate arguments, each value with references has a copy of their targets.
"""

Need = Literal["may", "must"]


class ValueParts:
    """Collects the grammars of argument values. param: the request's field, for error messages."""

    def __init__(self, param: str) -> None:
        self.made: list[Part] = []
        self._param = param
        self._characters = 0

    def add(self, part: Part) -> None:
        """Add a grammar. Raises InvalidRequest if all of them together become too large."""
        self._characters += extent(part).characters
        if self._characters > MAX_CHARACTERS:
            raise InvalidRequest(
                f"{self._param}: the schemas of these tools are too large for a grammar: "
                f"{self._characters} characters or more, with their references; the limit is "
                f"{MAX_CHARACTERS}: send fewer tools, or none that is strict",
                self._param,
            )
        self.made.append(part)


class Lexicon(Protocol):
    """The methods of llguidance's `LLTokenizer` that grammars use."""

    def tokenize_str(self, text: str, *, parse_special: bool = False) -> Sequence[int]: ...

    def is_special_token(self, token: int) -> bool: ...


class CallGrammar(Protocol):
    """Builds the Lark rules of one format's calls, for one tokenizer."""

    def tool_rules(self, index: int, tool: Tool, schema: Any, parts: ValueParts) -> list[str]:
        """Return the rule `tool_INDEX`, which matches a call without its tags, and the rules that
        it uses.

        parts: receives the grammars of values. Raises InvalidRequest that names the field of the
        schema.
        """
        ...

    def answer_rules(self, need: Need, parallel: bool, answer: bool) -> list[str]:
        """Return the rules for a response, starting with `start`. The rule `called` matches a call
        of any tool.

        need: "must" requires one call, or at least one if `parallel`. "may" allows any text in
            which each opening tag is followed by a call.
        answer: with "must", also allow a response that matches `@answer` instead of calls.
        """
        ...


class TaggedCalls:
    """Builds the rules of calls between two tags.

    gap: text after the opening tag.
    between: text between two calls.
    """

    def __init__(
        self, lexicon: Lexicon, opens: str, closes: str, gap: str = "", between: str = ""
    ) -> None:
        self._tag = opens
        self._opening, self._closing = tag_term(lexicon, opens), tag_term(lexicon, closes)
        self._gap = gap
        self._between = f"({quoted(between)} call)" if between else "call"

    def answer_rules(self, need: Need, parallel: bool, answer: bool) -> list[str]:
        if need == "may":
            repeated = "*" if parallel else "?"
            return [
                f"start: (begun called {self._closing}){repeated} AFTER",
                text_without(self._tag),
                begun_rule(self._tag, self._opening, self._gap),
            ]
        return [
            start_rule(answer),
            f"calls: call {self._between}*" if parallel else "calls: call",
            f"call: {opening(self._opening, self._gap)} called {self._closing}",
        ]


def tag_term(lexicon: Lexicon, tag: str) -> str:
    """Return the Lark term that matches `tag`.

    llguidance treats every added token that looks like a tag as special. Such a token is only
    matched by its own term, never by its letters or by arbitrary text.
    """
    tokens = lexicon.tokenize_str(tag, parse_special=True)
    if len(tokens) == 1 and lexicon.is_special_token(tokens[0]):
        return f"<[{tokens[0]}]>"
    return json.dumps(tag)


def start_rule(answer: bool) -> str:
    return "start: calls | @answer" if answer else "start: calls"


def opening(term: str, gap: str) -> str:
    return f"{term} {quoted(gap)}" if gap else term


def pattern(tag: str) -> str:
    """Return a regular expression that matches `tag` literally, in Lark's syntax."""
    return re.escape(tag).replace("/", "\\/")


def text_without(tag: str, more: str = "") -> str:
    """Return the Lark rule AFTER for text that does not contain `tag`. more: a further restriction,
    as a Lark expression.
    """
    return f"AFTER: /(?s:.*)/ & ~/(?s:.*){pattern(tag)}(?s:.*)/{more}"


def begun_rule(tag: str, term: str, gap: str = "") -> str:
    """Return the Lark rule `begun` for text up to and including the first opening tag. term:
    matches the tag.
    """
    if term == quoted(tag):
        return f"begun: before\nbefore[suffix={quoted(tag + gap)}]: /(?s:.*)/"
    return f"begun: AFTER {opening(term, gap)}"


def arguments_of(index: int, schema: Any, parts: ValueParts) -> str:
    """Add the grammar for a tool's arguments as a JSON object to `parts`, and return the term that
    matches it.
    """
    parts.add(schema_part(f"arguments_{index}", as_object(schema)))
    return f"@arguments_{index}"


def json_call(name: str, arguments: str, end: str = "}") -> str:
    """Return the terms that match a call as a JSON object with a name and arguments.

    arguments: the term for the arguments.
    end: the text after them.
    """
    head = f'{{"name": {json.dumps(name)}, "arguments": '
    return f"{quoted(head)} {arguments} {quoted(end)}"


def as_object(schema: Any) -> dict[str, Any]:
    """Return the schema, restricted to JSON objects. Arguments must be one."""
    return {"type": "object", **(schema if isinstance(schema, dict) else {})}
