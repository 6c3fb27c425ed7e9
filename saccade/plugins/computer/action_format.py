"""The socket for action formats: what a model's way to act on a screen brings.

A format is a module in `formats/`. `find_format.py` finds it there, and no other file names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.plugins.computer.vocabulary import ActionWords, Word
from saccade.text.answer.tool_format import ToolFormat

Words = Mapping[str, Word]


@dataclass(frozen=True, slots=True)
class WrittenActions:
    """How a model writes actions as text, where its template knows no tools."""

    calls: ToolFormat  # reads such text, and holds the model to it
    instruct: Callable[[Words], str]  # what a conversation begins with, for the words on offer
    write: Callable[[str, Mapping[str, Any]], str]  # one call
    opens: str


@dataclass(frozen=True, slots=True)
class ActionFormat:
    """A model's way to act: `FORMAT` in a module of that name."""

    name: str
    # whether a model uses this format, by its family and name. Formats are tried from the lowest
    # `order`.
    serves: Callable[[str, str], bool]
    order: int
    vocabulary: ActionWords
    # whether coordinates are in pixels of the image that the model saw, by its family. They
    # are thousandths of the screen otherwise.
    in_pixels: Callable[[str], bool]
    # the description and the parameters of the vocabulary's one tool, for the words on offer and
    # the resolution that the model counts in ("" if unknown)
    describe: Callable[[Words, str], tuple[str, dict[str, Any]]] | None = None
    written: WrittenActions | None = None  # for models that act in text
    note: str = ""  # for people, behind the name
