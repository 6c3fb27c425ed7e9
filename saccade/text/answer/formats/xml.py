"""Tool calls in XML, as Qwen3.5 writes them:

<tool_call><function=NAME><parameter=NAME>
VALUE
</parameter></function></tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from saccade.text.answer.formats import FUNCTION
from saccade.text.answer.tool_format import CLOSE, OPEN, CallSyntax
from saccade.text.answer.typed_arguments import TypedCall
from saccade.text.grammar.call_grammar import Lexicon
from saccade.text.grammar.named_arguments import NamedArguments
from saccade.text.grammar.parts import quoted

_SPACE = " \t\r\n"
_FUNCTION_END = "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_GAP = 64
"""Maximum number of white space characters between two parameters. More are part of a value."""
_MAX_NAME = 256


class XmlCall(TypedCall):
    """Parses one call in XML."""

    plain = re.compile(r"[^\n<]+")

    def __init__(self, tools: Mapping[str, Any]) -> None:
        # function, name, parameter, key, first (character of a value), value, close
        super().__init__(tools, "function")

    def feed(self, character: str) -> bool:
        """Parse a character. Returns False, without consuming it, if the text cannot be a call."""
        match self._phase:
            case "function":
                return self._feed_tag(character, {FUNCTION: "name"})
            case "name":
                return self._feed_name(character)
            case "parameter":
                return self._feed_tag(character, {_PARAMETER: "key", _FUNCTION_END: "close"})
            case "key":
                return self._feed_name(character)
            case "first":
                self._phase = "value"
                if character != "\n":
                    self._read_value(character)
                return True
            case "value":
                self._read_value(character)
                return True
        return self._feed_tag(character, {CLOSE: "done"})

    def _feed_tag(self, character: str, tags: Mapping[str, str]) -> bool:
        """Parse white space, then one of `tags`, which map to the next state. Returns False if the
        text is neither.
        """
        if character in _SPACE and not self._word:
            return True
        self._word += character
        if self._word in tags:
            self._enter(tags[self._word])
            self._word = ""
            return True
        return any(tag.startswith(self._word) for tag in tags)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self.done = phase == "done"
        if phase == "close":
            self._arguments.end_object()

    def _feed_name(self, character: str) -> bool:
        if character != ">":
            self._word += character
            return character not in "<\r\n" and len(self._word) <= _MAX_NAME
        name, self._word = self._word.strip(), ""
        if self._phase == "name":
            self.name = self._arguments.tool = name
            self._phase = "parameter"
            return bool(name)
        self._phase = "first"
        return self._arguments.begin_value(name)

    def _read_value(self, character: str) -> None:
        if tag := self.feed_value(character):
            self._enter("key" if tag == _PARAMETER else "close")

    def value_end(self, tail: str) -> str | None:
        rest = tail.removeprefix("\n")
        if len(rest) < len(_PARAMETER_END):
            return "" if _PARAMETER_END.startswith(rest) else None
        if not rest.startswith(_PARAMETER_END):
            return None
        gap = rest[len(_PARAMETER_END) :]
        tag = gap.lstrip(_SPACE)
        if len(gap) - len(tag) > _MAX_GAP:
            return None
        if tag in (_PARAMETER, _FUNCTION_END):
            return tag
        return "" if _PARAMETER.startswith(tag) or _FUNCTION_END.startswith(tag) else None


class XmlGrammar(NamedArguments):
    """Builds the grammar of calls in XML. Each call and each of its tags is on a separate line."""

    def __init__(self, lexicon: Lexicon) -> None:
        super().__init__(lexicon, OPEN, CLOSE, gap="\n", between="\n")

    def around_call(self, name: str) -> tuple[str, list[str]]:
        return quoted(f"{FUNCTION}{name}>\n"), [quoted(f"{_FUNCTION_END}\n")]

    def around_value(self, name: str) -> tuple[str, str]:
        return quoted(f"{_PARAMETER}{name}>\n"), quoted(f"\n{_PARAMETER_END}\n")


SYNTAX = CallSyntax(reader=XmlCall, grammar=XmlGrammar)
