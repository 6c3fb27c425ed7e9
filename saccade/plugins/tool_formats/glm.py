"""Tool calls of GLM-4.5, GLM-4.6 and their vision models:

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value></tool_call>

The line breaks are optional. Strings are verbatim, other values are JSON. zai-org/GLM-4.5V's
chat_template.jinja instructs the model to write calls in this format ("output the function name and
arguments within the following XML format").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from saccade.plugins.tool_formats.formats import KEY, KEY_END
from saccade.text.answer.tool_format import CLOSE, OPEN, CallSyntax
from saccade.text.answer.typed_arguments import TypedCall
from saccade.text.grammar.call_grammar import Lexicon, pattern, tag_term
from saccade.text.grammar.named_arguments import NamedArguments
from saccade.text.grammar.parts import quoted

VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_SPACE = " \t\r\n"
_MAX_GAP = 64
"""Maximum white space between two arguments, in characters. A longer one is part of a value."""
_MAX_NAME = 256


class GlmCall(TypedCall):
    """Parses one call."""

    plain = re.compile(r"[^<]+")

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools, "name")  # name, key, between (a key and its value), value

    def feed(self, character: str) -> bool:
        """Parse a character. Return False, without consuming it, if the text cannot be a call."""
        if self._phase == "value":
            if tag := self.feed_value(character):
                self._after_value(tag)
            return True
        self._word += character
        if len(self._word) > _MAX_NAME + _MAX_GAP:
            return False
        if self._phase == "name":
            return self._feed_name()
        if self._phase == "key":
            return self._feed_key()
        tag = self._word.lstrip(_SPACE)
        if tag == VALUE:
            self._phase, self._word = "value", ""
        return VALUE.startswith(tag)

    def _feed_name(self) -> bool:
        """Parse the name, and the start of the first key or the end of the call."""
        name, mark, rest = self._word.strip(_SPACE).partition("<")
        tag = mark + rest
        name = name.rstrip(_SPACE)
        if set(name) & set(_SPACE) or (tag and not name):
            return False
        if tag in (KEY, CLOSE):
            self.name = self._arguments.tool = name
            self._after_value(tag)
        return KEY.startswith(tag) or CLOSE.startswith(tag)

    def _feed_key(self) -> bool:
        key, mark, rest = self._word.partition("<")
        if mark + rest == KEY_END:
            self._phase, self._word = "between", ""
            return self._arguments.begin_value(key.strip())
        return KEY_END.startswith(mark + rest) and "\n" not in key

    def value_end(self, tail: str) -> str | None:
        if not tail.startswith(VALUE_END):
            return "" if VALUE_END.startswith(tail) else None
        gap = tail[len(VALUE_END) :]
        tag = gap.lstrip(_SPACE)
        if len(gap) - len(tag) > _MAX_GAP:
            return None
        if tag in (KEY, CLOSE):
            return tag
        return "" if KEY.startswith(tag) or CLOSE.startswith(tag) else None

    def _after_value(self, tag: str) -> None:
        self._phase, self._word = "key", ""
        self.done = tag == CLOSE
        if self.done:
            self._arguments.end_object()


class GlmGrammar(NamedArguments):
    """The grammar of calls on separate lines. The tags around names and values may be single
    tokens.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        super().__init__(lexicon, OPEN, CLOSE, between="\n")
        self._key, self._key_end = tag_term(lexicon, KEY), tag_term(lexicon, KEY_END)
        self._value, self._value_end = tag_term(lexicon, VALUE), tag_term(lexicon, VALUE_END)

    def around_call(self, name: str) -> tuple[str, list[str]]:
        return quoted(f"{name}\n"), []

    def around_value(self, name: str) -> tuple[str, str]:
        head = f'{self._key} {quoted(name)} {self._key_end} "\\n" {self._value}'
        return head, f'{self._value_end} "\\n"'

    def text_rules(self, rule: str, head: str, tail: str) -> list[str]:
        if self._value_end == quoted(VALUE_END):
            return super().text_rules(rule, head, quoted(f"{VALUE_END}\n"))
        name = f"{rule}_text".upper()
        return [
            f"{rule}: {head} {name} {tail}",
            f"{name}: /(?s:.*)/ & ~/(?s:.*){pattern(VALUE_END)}(?s:.*)/",
        ]


SYNTAX = CallSyntax(reader=GlmCall, grammar=GlmGrammar)
