"""The socket for action formats: what a model's way to act on a screen brings.

A format is a module in `formats/`. `find_format.py` finds it there, and no other file names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.text.actions.vocabulary import ActionWords, Word
from saccade.text.answer.tool_format import ToolFormat

Words = Mapping[str, Word]


@dataclass(frozen=True, slots=True)
class WrittenActions:
    """How a model writes actions as text, where its template knows no tools.

    calls: reads such text, and holds the model to it. instruct: what a conversation begins with,
    for the words on offer. write: one call.
    """

    calls: ToolFormat
    instruct: Callable[[Words], str]
    write: Callable[[str, Mapping[str, Any]], str]
    opens: str


@dataclass(frozen=True, slots=True)
class ActionFormat:
    """A model's way to act: `FORMAT` in a module of that name.

    serves: tells by a model's family and name whether it acts this way. Formats are asked from the
    lowest `order`. in_pixels: tells by the family whether coordinates count the pixels of the image
    that the model saw. They count thousandths of the screen otherwise.

    describe: the description and the parameters of the vocabulary's one tool, for the words on
    offer and the resolution that the model counts in ("" if unknown). written: for models that act
    in text. note: for people, behind the name.
    """

    name: str
    serves: Callable[[str, str], bool]
    order: int
    vocabulary: ActionWords
    in_pixels: Callable[[str], bool]
    describe: Callable[[Words, str], tuple[str, dict[str, Any]]] | None = None
    written: WrittenActions | None = None
    note: str = ""
