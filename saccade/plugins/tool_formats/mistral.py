"""Tool calls of mistral-common's tokenizers, which have no closing tag:

    [TOOL_CALLS][{"name": NAME, "arguments": {...}}, {...}]      versions 3 and 7
    [TOOL_CALLS]NAME[ARGS]{...}                                  versions 11 and later

Before [ARGS], [CALL_ID]ID is optional.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from saccade.plugins.tool_formats.formats import ARGUMENTS, TOOL_CALLS
from saccade.text.answer.json_call import JsonCall, JsonScanner
from saccade.text.answer.tool_format import CallSyntax
from saccade.text.grammar.call_grammar import (
    Lexicon,
    Need,
    ValueParts,
    arguments_of,
    begun_rule,
    json_call,
    start_rule,
    tag_term,
    text_without,
)
from saccade.text.grammar.parts import quoted
from saccade.text.grammar.tools import Tool

_SPACE = " \t\r\n"
_MAX_NAME = 256
_NAMED = re.compile(r"([\w.\-]+)\s*(?:\[CALL_ID\][\w\-]+)?(?:\[ARGS\])?\s*")


class MistralCall:
    """Parses one call, or the end of a list of calls, for which `name` is None."""

    def __init__(self, first: bool = True) -> None:
        """Start a call.

        first: whether it is the first call after a tag.
        """
        self.name: str | None = None
        self.done = False
        self._phase = "begin" if first else "between"  # begin, between, name, object, arguments
        self._list = not first
        self._word = ""
        self._object = JsonCall("")
        self._scanner = JsonScanner()
        self._ready: list[str] = []

    @property
    def certain(self) -> bool:
        return self.name is not None and (bool(self._ready) or self._object.certain)

    def take_arguments(self) -> str:
        taken = "".join(self._ready) + self._object.take_arguments()
        self._ready.clear()
        return taken

    def following(self) -> MistralCall | None:
        """Return the parser for text that follows the call without a tag, or None if none may
        follow.
        """
        return MistralCall(first=False) if self._list and self.name is not None else None

    def feed(self, character: str) -> bool:
        """Parse a character. Return False, without consuming it, if the text cannot be a call."""
        match self._phase:
            case "begin":
                return character in _SPACE or self._begin(character)
            case "between":
                return character in _SPACE or self._continue_list(character)
            case "name":
                return self._feed_name(character)
            case "object":
                taken = self._object.feed(character)
                self.name, self.done = self._object.name, self._object.done
                return taken
        return self._feed_arguments(character)

    def skip(self, data: str, at: int) -> int:
        """Consume the plain characters of a string in `data` that start at `at`.

        Returns the index after them.
        """
        if self._phase == "object":
            return self._object.skip(data, at)
        end = self._scanner.skip(data, at) if self._phase == "arguments" else at
        if end > at:
            self._ready.append(data[at:end])
        return end

    def _begin(self, character: str) -> bool:
        self._list = character == "["
        self._phase, self._word = ("object", "") if self._list else ("name", character)
        return True

    def _continue_list(self, character: str) -> bool:
        self.done = character == "]"
        if character == ",":
            self._phase = "object"
        return self.done or character == ","

    def _feed_name(self, character: str) -> bool:
        if character != "{":
            self._word += character
            return character not in "\r\n" and len(self._word) <= _MAX_NAME
        named = _NAMED.fullmatch(self._word)
        if named is None:
            return False
        self.name, self._phase = named[1], "arguments"
        return self._feed_arguments(character)

    def _feed_arguments(self, character: str) -> bool:
        piece = self._scanner.feed(character)
        if piece is None:
            return False
        self._ready.append(piece)
        self.done = self._scanner.done
        return True


class MistralGrammar:
    """The grammar of calls at the end of a response.

    Each call has a tag. Before version 11, a whole list of calls has a single tag.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        self._opening, self._arguments = tag_term(lexicon, TOOL_CALLS), tag_term(lexicon, ARGUMENTS)
        self._lists = self._arguments == quoted(ARGUMENTS)  # the tokenizer does not have that tag

    def tool_rules(self, index: int, tool: Tool, schema: Any, parts: ValueParts) -> list[str]:
        arguments = arguments_of(index, schema, parts)
        if self._lists:
            return [f"tool_{index}: {json_call(tool.name, arguments)}"]
        return [f"tool_{index}: {quoted(tool.name)} {self._arguments} {arguments}"]

    def answer_rules(self, need: Need, parallel: bool, answer: bool) -> list[str]:
        if self._lists:
            more = ' (", " called)*' if parallel else ""
            behind = f'"[" called{more} "]"'
        else:
            behind = "called call*" if parallel else "called"
        call = f"call: {self._opening} called"
        if need == "must":
            return [start_rule(answer), f"calls: {self._opening} {behind}", call]
        begun = begun_rule(TOOL_CALLS, self._opening)
        return [f"start: AFTER | begun {behind}", text_without(TOOL_CALLS), begun, call]


def _nine_characters() -> str:
    return secrets.token_hex(5)[:9]


SYNTAX = CallSyntax(
    reader=lambda _: MistralCall(),
    grammar=MistralGrammar,
    following=MistralCall.following,
    make_id=_nine_characters,
)
