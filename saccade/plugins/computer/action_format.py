"""The interface of action formats, in which models act on a screen.

A format is a module in `formats/`, which `find_format.py` discovers. No other file names it.
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
    """How a model writes actions as text, if its chat template does not support tools."""

    calls: ToolFormat  # parses such text, and constrains the model to it
    instruct: Callable[[Words], str]  # the start of a conversation, for the available actions
    write: Callable[[str, Mapping[str, Any]], str]  # writes one call
    opens: str


@dataclass(frozen=True, slots=True)
class ActionFormat:
    """A model's action format. Its module exports it as `FORMAT`."""

    name: str
    # whether a model uses this format, by its family and name. Formats are tried in ascending
    # `order`.
    serves: Callable[[str, str], bool]
    order: int
    vocabulary: ActionWords
    # whether coordinates are pixels of the image that the model has seen, by its family. Otherwise,
    # they are thousandths of the screen.
    in_pixels: Callable[[str], bool]
    # the description and parameters of the vocabulary's single tool, for the available actions and
    # the resolution of the model's coordinates ("" if unknown)
    describe: Callable[[Words, str], tuple[str, dict[str, Any]]] | None = None
    written: WrittenActions | None = None  # for models that act in text
    note: str = ""  # logged after the name
