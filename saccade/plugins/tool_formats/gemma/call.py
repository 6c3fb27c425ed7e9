"""Parses a tool call of Gemma 4, character by character:

    call:NAME{KEY:VALUE,KEY:VALUE}<tool_call|>

It follows <|tool_call>. Strings are verbatim between <|"|>, keys bare or between <|"|>, and
everything else is as in JSON. Gemma 4's chat_template.jinja writes past calls like this
(`format_argument`).
"""

from __future__ import annotations

import json
import re

from saccade.plugins.tool_formats.formats import CALL_CLOSE, QUOTE
from saccade.text.answer.json_call import MAX_DEPTH, NUMBER

_CALL = "call:"
_HEAD = re.compile(_CALL + r"([^\s{}<>]+)\{")
_PLAIN = re.compile(r"[^<]+")
_SPACE = " \t\r\n"
_MARKS = frozenset("{}[],:")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}
MAX_WORD = 400
"""Maximum characters of a name, a bare key or a number."""


class GemmaCall:
    """Parses one call. Its arguments are converted to JSON as they arrive."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._word = ""  # bare text that is being read; or the start of the call, or of a tag
        self._quoted = False
        self._stack: list[str] = []  # expected closing brackets, innermost last
        # expected next: head, first key, key, colon, first, value, next, close
        self._due = "head"
        self._key: list[str] = []  # the quoted key that is being read
        self._ready: list[str] = []

    @property
    def done(self) -> bool:
        return self._due == "close" and self._word == CALL_CLOSE

    @property
    def certain(self) -> bool:
        return self.name is not None and bool(self._ready)

    def take_arguments(self) -> str:
        taken = "".join(self._ready)
        self._ready.clear()
        return taken

    def skip(self, data: str, at: int) -> int:
        """Consume the plain characters of a string in `data` that start at `at`.

        Returns the index after them.
        """
        plain = _PLAIN.match(data, at) if self._quoted and not self._word else None
        if plain is None:
            return at
        self._emit_text(plain.group())
        return plain.end()

    def feed(self, character: str) -> bool:
        """Parse a character. Return False, without consuming it, if the text cannot be a call."""
        if self._quoted:
            return self._feed_quoted(character)
        if self._due == "head":
            return self._feed_head(character)
        if self._due == "close":
            self._word = (self._word + character).lstrip(_SPACE)
            return CALL_CLOSE.startswith(self._word)
        if character in _MARKS and not self._word.startswith("<"):
            return self._end_word() and self._feed_mark(character)
        self._word = (self._word + character).lstrip(_SPACE)
        if self._word == QUOTE:
            return self._open_quote()
        return len(self._word) <= MAX_WORD and (
            "<" not in self._word or QUOTE.startswith(self._word)
        )

    def _feed_head(self, character: str) -> bool:
        self._word = (self._word + character).lstrip(_SPACE)
        if (head := _HEAD.fullmatch(self._word)) is None:
            begun = _CALL.startswith(self._word[: len(_CALL)])
            return begun and character != "{" and len(self._word) <= MAX_WORD
        self.name, self._word = head[1], ""
        return self._open("}", "{")

    def _feed_quoted(self, character: str) -> bool:
        self._word += character
        while not QUOTE.startswith(self._word):
            self._emit_text(self._word[0])
            self._word = self._word[1:]
        if self._word != QUOTE:
            return True
        self._word, self._quoted = "", False
        if self._due != "colon":
            self._ready.append('"')
            return True
        self._ready.append(json.dumps("".join(self._key), ensure_ascii=False))
        self._key = []
        return True

    def _emit_text(self, text: str) -> None:
        if self._due == "colon":
            self._key.append(text)
        else:
            self._ready.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _open_quote(self) -> bool:
        if self._due not in ("first key", "key", "first", "value"):
            return False
        self._word, self._quoted = "", True
        if self._due in ("first key", "key"):
            self._due = "colon"
        else:
            self._ready.append('"')
            self._due = "next"
        return True

    def _end_word(self) -> bool:
        """End the text without quotes before a bracket, comma or colon, if there is any: a key,
        number or literal.
        """
        word, self._word = self._word.rstrip(_SPACE), ""
        if not word:
            return True
        if self._due in ("first key", "key"):
            self._due = "colon"
            self._ready.append(json.dumps(word, ensure_ascii=False))
            return True
        if self._due not in ("first", "value"):
            return False
        self._due = "next"
        self._ready.append(_WORDS.get(word, word))
        return word in _WORDS or NUMBER.fullmatch(word) is not None

    def _feed_mark(self, mark: str) -> bool:
        due = self._due
        if mark in "{[":
            return due in ("first", "value") and self._open("}" if mark == "{" else "]", mark)
        self._ready.append(mark)
        if mark in "}]":
            return self._close(mark)
        self._due = "value" if mark == ":" or self._stack[-1] == "]" else "key"
        return due == ("colon" if mark == ":" else "next")

    def _open(self, closing: str, mark: str) -> bool:
        self._ready.append(mark)
        self._stack.append(closing)
        self._due = "first key" if closing == "}" else "first"
        return len(self._stack) <= MAX_DEPTH

    def _close(self, mark: str) -> bool:
        allowed = ("next", "first key" if mark == "}" else "first")
        if self._stack.pop() != mark or self._due not in allowed:
            return False
        self._due = "next" if self._stack else "close"
        return True
