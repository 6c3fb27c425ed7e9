"""Calls in XML, as Qwen3.5 writes them:

<tool_call><function=NAME><parameter=NAME>
VALUE
</parameter></function></tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLTokenizer

from saccade.text.answer.tool_format import CLOSE, OPEN, ToolFormat
from saccade.text.answer.typed_arguments import TypedArguments
from saccade.text.grammar.grammars import quoted
from saccade.text.grammar.named_arguments import NamedArguments

_SPACE = " \t\r\n"
FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_PLAIN = re.compile(r"[^\n<]+")
_MAX_GAP = 64
"""White space between two parameters, in characters; with more, it is part of a value."""
_MAX_NAME = 256


class XmlCall:
    """A call being read."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        """Begin a call. `tools`: parameters' schemas by tool."""
        self.name: str | None = None
        self._phase = "function"  # function, name, parameter, key, value, close
        self._word = ""  # a tag or a name being read
        self._tail = ""  # the end of a value, or part of one
        self._fresh = False  # nothing of the value was read
        self._arguments = TypedArguments(tools)
        self.take_arguments = self._arguments.take_arguments
        self.done = False

    @property
    def certain(self) -> bool:
        return self.name is not None and bool(self._arguments.ready)

    def feed(self, character: str) -> bool:
        """Read on. Return False, and leave `character` out, if the text stops being a call."""
        match self._phase:
            case "function":
                return self._feed_tag(character, {FUNCTION: "name"})
            case "name":
                return self._feed_name(character)
            case "parameter":
                return self._feed_tag(character, {_PARAMETER: "key", _FUNCTION_END: "close"})
            case "key":
                return self._feed_name(character)
            case "value":
                self._feed_value(character)
                return True
        return self._feed_tag(character, {CLOSE: "done"})

    def skip(self, data: str, at: int) -> int:
        """Take the characters in `data` from `at` on that only lengthen a value.

        Returns the index behind them.
        """
        plain = None
        if self._phase == "value" and not self._fresh and not self._tail:
            plain = _PLAIN.match(data, at)
        if plain is None:
            return at
        self._arguments.add_text(plain.group())
        return plain.end()

    def _feed_tag(self, character: str, tags: Mapping[str, str]) -> bool:
        """Read white space, then one of `tags`, which decides the next state."""
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
        self._phase, self._fresh = "value", True
        return self._arguments.begin_value(name)

    def _feed_value(self, character: str) -> None:
        if self._fresh:
            self._fresh = False
            if character == "\n":
                return
        self._tail += character
        while (end := _value_end(self._tail)) is None:
            self._arguments.add_text(self._tail[0])
            self._tail = self._tail[1:]
        if end:
            self._end_value(end)

    def _end_value(self, tag: str) -> None:
        self._arguments.end_value()
        self._tail = ""
        self._enter("key" if tag == _PARAMETER else "close")


def _value_end(tail: str) -> str | None:
    """Return the tag after a value that ends in `tail`.

    Returns an empty string if more must come, and `None` if the value goes on.
    """
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
    """Grammar of calls on lines of their own, like all within them."""

    def __init__(self, lexicon: LLTokenizer) -> None:
        super().__init__(lexicon, OPEN, CLOSE, gap="\n", between="\n")

    def around_call(self, name: str) -> tuple[str, list[str]]:
        return quoted(f"{FUNCTION}{name}>\n"), [quoted(f"{_FUNCTION_END}\n")]

    def around_value(self, name: str) -> tuple[str, str]:
        return quoted(f"{_PARAMETER}{name}>\n"), quoted(f"\n{_PARAMETER_END}\n")


FORMAT = ToolFormat(
    "xml",
    marks=(FUNCTION,),
    order=10,
    opens=OPEN,
    tags=frozenset({OPEN, CLOSE}),
    reader=XmlCall,
    grammar=XmlGrammar,
)
