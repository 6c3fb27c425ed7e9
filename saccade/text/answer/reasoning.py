"""Separates reasoning from the rest of a response incrementally, and removes the line breaks that
chat templates put between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags that enclose reasoning."""

    open: str
    close: str
    title: str = ""  # text that follows the opening tag
    name: str = ""  # the value of `--reasoning-parser`

    @property
    def begin(self) -> str:
        return self.open + self.title


THINK = Tags("<think>", "</think>", name="think")

Where = Literal["open", "closed", "either"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the reasoning, or of the response after it."""

    text: str
    reasoning: bool


def reasoning_at(prompt: str, tags: Tags = THINK) -> Where:
    """Return whether the response to a rendered prompt starts within reasoning.

    open: the template has opened reasoning.
    closed: the template has opened and closed reasoning.
    either: the response may start with or without reasoning.
    """
    end = prompt.rstrip()
    return (
        "open" if end.endswith(tags.begin) else "closed" if end.endswith(tags.close) else "either"
    )


class Reasoning:
    """Splits one response into reasoning and the rest. The result does not depend on how the text
    is divided into updates.
    """

    def __init__(self, where: Where, tags: Tags = THINK) -> None:
        self._where: Where = where
        self._tags = tags
        self._held = ""
        self._begun = False  # part of the current section was returned

    @property
    def reasons(self) -> bool:
        """True while the response is within reasoning."""
        return self._where == "open"

    def feed(self, text: str) -> list[Piece]:
        """Add text. Return the text that is now certain to be reasoning or not."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def end(self) -> list[Piece]:
        """Return the text that was held back. Call this at the end of the response."""
        held, self._held = self._held, ""
        if self._where == "either":
            return [Piece(held, False)] if held else []
        return self._piece(held if held.strip("\n") else "")

    def _step(self, pieces: list[Piece]) -> bool:
        if self._where == "either":
            start = self._held.lstrip()
            begin = self._tags.begin
            if begin.startswith(start) and start != begin:
                return False
            if start.startswith(begin):
                self._where, self._held = "open", start[len(begin) :]
            else:
                # A response without reasoning is unchanged, including line breaks.
                self._where, self._begun = "closed", True
            return True
        if self._where == "closed":
            held, self._held = self._held, ""
            text = held if self._begun else held.lstrip("\n")
            pieces += self._piece(text)
            return False
        close = self._tags.close
        at = self._held.find(close)
        if at >= 0:
            pieces += self._piece(self._held[:at].rstrip("\n"))
            self._held = self._held[at + len(close) :]
            self._where, self._begun = "closed", False
            return True
        cut = len(self._held) - _begun(self._held, close)
        cut = len(self._held[:cut].rstrip("\n"))
        text, self._held = self._held[:cut], self._held[cut:]
        pieces += self._piece(text)
        return False

    def _piece(self, text: str) -> list[Piece]:
        if not self._begun:
            text = text.lstrip("\n")
        if not text:
            return []
        self._begun = True
        return [Piece(text, self._where == "open")]


def _begun(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
