"""Parses a tool call in JSON, character by character: {"name": ..., "arguments": {...}}.

After every character, the scanner checks whether the text can still become a JSON document. Models
write control characters in strings. These are accepted, and replaced by escapes.
"""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = " \t\r\n"
MAX_DEPTH = 128
_MAX_NUMBER = 400
"""Maximum number of characters in a JSON number."""
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMERIC = frozenset("0123456789+-.eE")
_LITERALS = ("true", "false", "null")


class JsonScanner:
    """Scans one JSON object, list, string or null. Other values have no closing character, so they
    are not supported.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []  # expected closing brackets, innermost last
        # expected next: value, first (value or ]), key, first key (key or }), colon, or next (a
        # comma or a closing bracket)
        self._due = "value"
        self._in_string = False
        self._escape = -1  # expected characters of an escape after \; -1: not in an escape
        self._word = ""  # the number or literal that is being read
        self.done = False

    def feed(self, character: str) -> str | None:
        """Return `character` as strict JSON, or `None` if the text so far cannot become a JSON
        document.
        """
        assert not self.done
        if self._in_string:
            return self._feed_string(character)
        if self._word:
            if character in _NUMERIC or character.isalpha():
                return self._feed_word(character)
            if not self._end_word():
                return None
        if character in _SPACE:
            return character
        return character if self._feed_mark(character) else None

    def skip(self, data: str, at: int) -> int:
        """Return the index after the plain characters of a string that start at `at` in `data`."""
        plain = _PLAIN.match(data, at) if self._in_string and self._escape < 0 else None
        return at if plain is None else plain.end()

    def _feed_string(self, character: str) -> str | None:
        if self._escape > 0:
            self._escape -= 1
            if self._escape == 0:
                self._escape = -1
            return character if character in "0123456789abcdefABCDEF" else None
        if self._escape == 0:
            self._escape = 4 if character == "u" else -1
            return character if character in '"\\/bfnrtu' else None
        if character == "\\":
            self._escape = 0
        elif character == '"':
            self._in_string = False
            self._end_value()
        elif character < " ":
            return json.dumps(character)[1:-1]
        return character

    def _feed_word(self, character: str) -> str | None:
        word = self._word = self._word + character
        if word in _LITERALS:
            self._word = ""
            self._end_value()
            return character
        numeric = word[0] in "-0123456789" and character in _NUMERIC and len(word) <= _MAX_NUMBER
        begun = any(literal.startswith(word) for literal in _LITERALS)
        return character if numeric or begun else None

    def _end_word(self) -> bool:
        whole = NUMBER.fullmatch(self._word) is not None
        self._word = ""
        self._end_value()
        return whole

    def _feed_mark(self, character: str) -> bool:
        due = self._due
        if character in "]}":
            return self._close(character)
        if due == "colon":
            self._due = "value"
            return character == ":"
        if due == "next":
            self._due = "key" if self._stack[-1] == "}" else "value"
            return character == ","
        if due in ("key", "first key"):
            self._in_string = character == '"'
            self._due = "key"
            return self._in_string
        return self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        if character in "[{":
            self._stack.append("]" if character == "[" else "}")
            self._due = "first" if character == "[" else "first key"
            return len(self._stack) <= MAX_DEPTH
        self._due = "value"
        if character == '"':
            self._in_string = True
        elif character in "-0123456789tfn":
            # A number has no closing character, so it is not supported as the entire value.
            self._word = character
            return bool(self._stack) or character == "n"
        else:
            return False
        return True

    def _close(self, character: str) -> bool:
        first = "first" if character == "]" else "first key"
        if not self._stack or self._stack[-1] != character or self._due not in (first, "next"):
            return False
        self._stack.pop()
        self._due = "value"
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._due = "colon" if self._due == "key" else "next"
        self.done = not self._stack


class JsonCall:
    """Parses one call in JSON."""

    def __init__(self, close: str, alias: str = "arguments") -> None:
        """Start a call.

        close: the tag that ends it.
        alias: the key of the arguments.
        """
        self.name: str | None = None
        self._close = close
        self._alias = alias
        self._phase = "begin"  # begin, key, colon, value, next, close
        self._first = True
        self._scanner: JsonScanner | None = None
        self._key: str | None = None
        self._text: list[str] = []  # the string or value that is being read
        self._seen: set[str] = set()
        self._ready: list[str] = []  # arguments to return from `take_arguments`
        self._matched = 0  # matched characters of the closing tag

    @property
    def done(self) -> bool:
        return self._phase == "close" and self._matched == len(self._close)

    @property
    def certain(self) -> bool:
        return self.name is not None and bool(self._ready)

    def take_arguments(self) -> str:
        taken = "".join(self._ready)
        self._ready.clear()
        return taken

    def feed(self, character: str) -> bool:
        """Parse a character. Returns False, without consuming it, if the text cannot be a call."""
        if self._scanner is not None:
            return self._feed_scanner(self._scanner, character)
        if character in _SPACE and not self._matched:
            return True
        match self._phase:
            case "begin":
                self._phase = "key"
                return character == "{"
            case "key":
                if character == "}" and self._first:
                    return False
                return character == '"' and self._scan(character)
            case "colon":
                self._phase = "value"
                return character == ":"
            case "value":
                allowed = '"' if self._key == "name" else '{"n'
                return character in allowed and self._scan(character)
            case "next":
                self._phase = "key" if character == "," else "close"
                return character == "," or (character == "}" and self._finish())
        self._matched += 1
        return character == self._close[self._matched - 1]

    def skip(self, data: str, at: int) -> int:
        """Consume the plain characters of a string in `data` that start at `at`.

        Returns the index after them.
        """
        end = at if self._scanner is None else self._scanner.skip(data, at)
        if end > at:
            self._text.append(data[at:end])
            if self._streams and self._text[0] == "{":
                self._ready.append(data[at:end])
        return end

    @property
    def _streams(self) -> bool:
        return self.name is not None and self._key == "arguments" and self._phase == "value"

    def _scan(self, character: str) -> bool:
        self._scanner, self._text = JsonScanner(), []
        return self._feed_scanner(self._scanner, character)

    def _feed_scanner(self, scanner: JsonScanner, character: str) -> bool:
        piece = scanner.feed(character)
        if piece is None:
            return False
        self._text.append(piece)
        streams = self._streams and self._text[0] == "{"
        if streams:
            self._ready.append(piece)
        if not scanner.done:
            return True
        self._scanner = None
        self._first = False
        return self._end_key() if self._phase == "key" else self._end_value(streams)

    def _end_key(self) -> bool:
        self._key = str(json.loads("".join(self._text)))
        if self._key == self._alias:
            self._key = "arguments"
        fresh = self._key in ("name", "arguments") and self._key not in self._seen
        self._seen.add(self._key)
        self._phase = "colon"
        return fresh

    def _end_value(self, streamed: bool) -> bool:
        self._phase = "next"
        text = "".join(self._text)
        if self._key == "name":
            self.name = json.loads(text)
            return bool(self.name) and _is_text(self.name)
        if not streamed:
            arguments = _as_object(text)
            if arguments is None:
                return False
            self._ready.append(arguments)
        return True

    def _finish(self) -> bool:
        if "arguments" not in self._seen:
            self._ready.append("{}")
        return self.name is not None


def _as_object(text: str) -> str | None:
    """Return the arguments as the text of a JSON object, or `None` if they are invalid.

    They may be an object, a string that contains an object as JSON, or null.
    """
    if text.startswith("{"):
        return text
    value: Any = json.loads(text)
    if value is None:
        return "{}"
    scanner = JsonScanner()
    inner = str(value).strip(_SPACE)
    pieces = []
    for character in inner if inner.startswith("{") else "":
        piece = None if scanner.done else scanner.feed(character)
        if piece is None:
            return None
        pieces.append(piece)
    return "".join(pieces) if scanner.done and _is_text(inner) else None


def _is_text(text: Any) -> bool:
    try:
        str(text).encode()
    except UnicodeEncodeError:
        return False
    return True
