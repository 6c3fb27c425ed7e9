"""The socket for tool formats: what one brings to be found, read and held to by a grammar.

A format is data, which every server reads, and names a module with its code, which is imported
once an answer may have calls. `answer_format.py` finds those of Qwen-VL, in `formats/`, and those
of plugins.
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
"""The tags of several formats."""


class CallReader(Protocol):
    """Reads one call, from behind the tag that opens it."""

    name: str | None

    @property
    def done(self) -> bool: ...

    @property
    def certain(self) -> bool:
        """Return True once the name and the start of the arguments were read, in this order."""
        ...

    def feed(self, character: str) -> bool:
        """Read on. Return False, and leave `character` out, if the text stops being a call."""
        ...

    def skip(self, data: str, at: int) -> int:
        """Take the characters in `data` from `at` on that only lengthen a string, at once.

        Returns the index behind them.
        """
        ...

    def take_arguments(self) -> str:
        """Return the arguments read since the last call, as JSON."""
        ...


def any_id() -> str:
    """Return a new identifier for a call."""
    return f"call_{secrets.token_hex(12)}"


def _nothing(_: CallReader) -> None:
    return None


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The reader and the grammar of a format's calls."""

    # makes one call's reader from each tool's schema
    reader: Callable[[Mapping[str, Any]], CallReader]
    grammar: Callable[[Lexicon], CallGrammar]  # makes the calls' grammar, in a tokenizer's terms
    # creates the reader for text after a call without a tag
    following: Callable[[Any], CallReader | None] = _nothing
    make_id: Callable[[], str] = any_id


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls."""

    name: str
    # in a chat template
    marks: tuple[str, ...]  # texts, each of which shows the format in a chat template
    # formats are tried from the lowest. A format that shares another's marks therefore comes later.
    order: int
    # in an answer
    opens: str  # the tag that opens a call
    tags: frozenset[str]  # all that are read where calls are, special tokens or not
    code: str  # the `CallSyntax`, as "module:name"
    # where it differs from most
    bare: bool = False  # an object at the answer's beginning is a call without a tag
    thoughts: Tags | None = None  # the reasoning tags of this format only
    note: str = ""  # for people, behind the name

    @property
    def syntax(self) -> CallSyntax:
        """The format's code, imported at first use."""
        found: CallSyntax = resolve_name(self.code)
        return found
