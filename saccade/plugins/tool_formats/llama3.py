"""Tool calls in the format that the chat templates of Llama 3.1 to 3.3 request ("Respond in the
format {"name": function name, "parameters": dictionary of argument name and its value}"):

    {"name": NAME, "parameters": {...}}; {...}

They have no closing tag, and are at the start of the response or after <|python_tag|>.
"""

from __future__ import annotations

import json
from typing import Any

from saccade.plugins.tool_formats.formats import PYTHON_TAG
from saccade.text.answer.json_call import JsonCall
from saccade.text.answer.tool_format import CallSyntax
from saccade.text.grammar.call_grammar import (
    Need,
    ValueParts,
    arguments_of,
    start_rule,
    text_without,
)
from saccade.text.grammar.parts import quoted
from saccade.text.grammar.tools import Tool

_SPACE = " \t\r\n"


class Llama3Call:
    """Parses one call."""

    def __init__(self, first: bool = True) -> None:
        """Start a call.

        first: whether it is the first call of the response.
        """
        self.name: str | None = None
        self.done = False
        self._may_begin = first  # otherwise, a semicolon is expected
        self._begun = False
        self._object = JsonCall("", "parameters")
        self.take_arguments = self._object.take_arguments
        self.skip = self._object.skip

    @property
    def certain(self) -> bool:
        return self._object.certain

    def following(self) -> Llama3Call:
        """Return the parser for text that follows the call without a tag."""
        return Llama3Call(first=False)

    def feed(self, character: str) -> bool:
        """Parse a character. Return False, without consuming it, if the text cannot be a call."""
        if self._begun or (character == "{" and self._may_begin):
            self._begun = True
            taken = self._object.feed(character)
            self.name, self.done = self._object.name, self._object.done
            return taken
        if character in _SPACE:
            return True
        due, self._may_begin = not self._may_begin, True
        return due and character == ";"


class Llama3Grammar:
    """The grammar of responses that consist only of calls."""

    def tool_rules(self, index: int, tool: Tool, schema: Any, parts: ValueParts) -> list[str]:
        arguments = arguments_of(index, schema, parts)
        # Without a tag, tokenize it word by word, as the start of any JSON response would be.
        words = ("{", '"name"', ": ", json.dumps(tool.name), ", ", '"parameters"', ": ")
        return [f'tool_{index}: {" ".join(map(quoted, words))} {arguments} "}}"']

    def answer_rules(self, need: Need, parallel: bool, answer: bool) -> list[str]:
        calls = 'calls: called ("; " called)*' if parallel else "calls: called"
        if need == "must":
            return [start_rule(answer), calls]
        return ["start: calls | AFTER", text_without(PYTHON_TAG, r" & ~/\s*\{(?s:.*)/"), calls]


SYNTAX = CallSyntax(
    reader=lambda _: Llama3Call(), grammar=lambda _: Llama3Grammar(), following=Llama3Call.following
)
