"""The interface of tool-call formats: detection in templates, parsing, and grammar.

A `ToolFormat` has no code, so every server imports it. It names a module with code that is imported
when a response may contain calls. `answer_format.py` finds Qwen-VL's formats in `formats/`, and
those of plugins.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from saccade.text.answer.reasoning import Tags

if TYPE_CHECKING:
    from saccade.text.grammar.call_grammar import CallGrammar, Lexicon

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Tags around a call that several formats use."""


class CallReader(Protocol):
    """Parses one call, starting after its opening tag."""

    name: str | None

    @property
    def done(self) -> bool: ...

    @property
    def certain(self) -> bool:
        """True once the name and the start of the arguments have been parsed."""
        ...

    def feed(self, character: str) -> bool:
        """Parse a character. Returns False, without consuming it, if the text cannot be a call."""
        ...

    def skip(self, data: str, at: int) -> int:
        """Consume the plain characters of a string in `data` that start at `at`.

        Returns the index after them.
        """
        ...

    def take_arguments(self) -> str:
        """Return the part of the arguments that was parsed since the previous call of this method,
        as JSON.
        """
        ...


def any_id() -> str:
    """Return a new random call id."""
    return f"call_{secrets.token_hex(12)}"


def _no_following(_: CallReader) -> None:
    return None


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The code of a format: its parser and its grammar."""

    # creates the parser of one call, given each tool's schema
    reader: Callable[[Mapping[str, Any]], CallReader]
    grammar: Callable[[Lexicon], CallGrammar]  # creates the grammar for a tokenizer
    # creates the parser for text that follows a call without a tag
    following: Callable[[Any], CallReader | None] = _no_following
    make_id: Callable[[], str] = any_id


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The name, tags and code module of a tool-call format."""

    name: str
    # detection
    marks: tuple[str, ...]  # texts, any of which in a chat template indicates the format
    # Formats are tried in ascending order, so a format whose marks another one shares comes later.
    order: int
    # parsing
    opens: str  # the tag that starts a call
    tags: frozenset[str]  # tags to keep in the text even if they are special tokens
    code: str  # the `CallSyntax`, as "module:name"
    # optional
    bare: bool = False  # an object at the start of a response is a call without a tag
    thoughts: Tags | None = None  # reasoning tags that only this format uses
    note: str = ""  # shown after the name in the start-up report

    @property
    def syntax(self) -> CallSyntax:
        """The code of the format, imported at first use."""
        found: CallSyntax = resolve_name(self.code)
        return found
