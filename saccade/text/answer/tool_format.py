"""The socket for tool formats: what one brings to be found, read and held to by a grammar.

A format is a module or a folder in `formats/`. `answer_format.py` finds it there, and no other file
names it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from llguidance import LLTokenizer

from saccade.text.answer.reasoning import Tags
from saccade.text.grammar.call_grammar import CallGrammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""The tags of several formats."""


class CallReader(Protocol):
    """Reads one call, from behind the tag that opens it."""

    name: str | None

    @property
    def done(self) -> bool: ...

    @property
    def certain(self) -> bool:
        """Return True once the name and the beginning of the arguments have come, in this order."""
        ...

    def feed(self, character: str) -> bool:
        """Read on. Return False, and leave `character` out, if the text stops being a call."""
        ...

    def skip(self, data: str, at: int) -> int:
        """Take the characters in `data` from `at` on that only lengthen a string, in one go.

        Returns the index behind them.
        """
        ...

    def take_arguments(self) -> str:
        """Return the arguments that have come since the last call, as JSON."""
        ...


def any_id() -> str:
    """Return a new identifier for a call."""
    return f"call_{secrets.token_hex(12)}"


def _nothing(_: CallReader) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls: `FORMAT` in a module of that name.

    marks: texts, each of which shows the format in a chat template. order: formats are tried from
    the lowest. A format that shares another's marks therefore comes later. thoughts: the reasoning
    tags that come with this format alone.

    opens: the tag that opens a call. tags: all that are read where calls are, special tokens or
    not. reader: makes one call's reader from each tool's schema. following: makes the reader for
    what may come behind a call without a tag. bare: an object at the answer's beginning is a call
    without a tag. grammar: makes the calls' grammar, in a tokenizer's terms. note: for people,
    behind the name.
    """

    name: str
    # in a chat template
    marks: tuple[str, ...]
    order: int
    # in an answer
    opens: str
    tags: frozenset[str]
    reader: Callable[[Mapping[str, Any]], CallReader]
    grammar: Callable[[LLTokenizer], CallGrammar]
    # where it differs from most
    following: Callable[[Any], CallReader | None] = _nothing
    bare: bool = False
    make_id: Callable[[], str] = any_id
    thoughts: Tags | None = None
    note: str = ""
