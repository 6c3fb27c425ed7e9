"""Screenshots of a desktop of 1920 x 1080, and of events that change it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from saccade_bench.image_files import save

WIDTH, HEIGHT = 1920, 1080
Format = Literal["PNG", "JPEG"]
TEXT = (
    "a picture costs its work once and after that it costs a hash of its bytes so what an agent "
    "sees again is named and found while what has changed is drawn read and encoded anew"
)
INK, PAPER, SHADE = (24, 24, 28), (250, 250, 247), (225, 228, 232)
BAR, TERMINAL, GREEN = (44, 48, 58), (16, 18, 24), (120, 220, 140)


@dataclass(frozen=True, slots=True)
class Desktop:
    """The state of the desktop."""

    clock: str = "10:41"
    caret: bool = False
    typed: str = "git log --one"
    hovered: bool = False
    menu: bool = False
    terminal_line: int = 40
    dialog: bool = False
    page_line: int = 12


QUIET = Desktop()
EVENTS: Mapping[str, Desktop] = {
    "clock": replace(QUIET, clock="10:42"),
    "caret": replace(QUIET, caret=True),
    "typing": replace(QUIET, typed="git log --oneline"),
    "hover": replace(QUIET, hovered=True),
    "menu": replace(QUIET, menu=True),
    "terminal scroll": replace(QUIET, terminal_line=43),
    "dialog": replace(QUIET, dialog=True),
    "page scroll": replace(QUIET, page_line=15),
}
"""The desktop after one event each."""


def screenshot(desktop: Desktop, format: Format = "PNG") -> bytes:
    """Return a screenshot as a PNG, or as a JPEG of quality 85."""
    return save(draw(desktop), format, **({"quality": 85} if format == "JPEG" else {}))


def draw(desktop: Desktop) -> Image.Image:
    """Draw the desktop: a menu bar, a terminal on the left, and a document on the right."""
    image = Image.new("RGB", (WIDTH, HEIGHT), (70, 96, 122))
    pen = ImageDraw.Draw(image)
    _page(pen, desktop)
    _terminal(pen, desktop)
    pen.rectangle((0, 0, WIDTH, 31), fill=BAR)
    for place, name in enumerate(("File", "Edit", "View", "Window", "Help")):
        _write(pen, (20 + 80 * place, 6), name, SHADE)
    _write(pen, (WIDTH - 80, 6), desktop.clock, SHADE)
    if desktop.menu:
        pen.rectangle((100, 32, 320, 292), fill=PAPER, outline=SHADE)
        for line in range(8):
            _write(pen, (116, 44 + 30 * line), _line(line, 2), INK)
    if desktop.dialog:
        pen.rectangle((700, 400, 1220, 640), fill=PAPER, outline=INK, width=2)
        _write(pen, (730, 430), "Save the changes before you close?", INK)
        for left, word in ((900, "Save"), (1060, "Close")):
            pen.rectangle((left, 580, left + 120, 616), fill=SHADE, outline=INK)
            _write(pen, (left + 36, 588), word, INK)
    return image


def _terminal(pen: ImageDraw.ImageDraw, desktop: Desktop) -> None:
    left, top, right, bottom = 20, 60, 780, 1050
    pen.rectangle((left, top, right, bottom), fill=TERMINAL)
    pen.rectangle((left, top, right, top + 28), fill=SHADE)
    _write(pen, (left + 12, top + 5), "terminal", INK)
    lines = 36
    for line in range(lines):
        text = _line(desktop.terminal_line + line, 8)
        _write(pen, (left + 12, top + 40 + 24 * line), text, (200, 204, 208))
    at = top + 40 + 24 * lines
    _write(pen, (left + 12, at), f"$ {desktop.typed}", GREEN)
    if desktop.caret:
        place = left + 14 + 9 * (len(desktop.typed) + 2)
        pen.rectangle((place, at, place + 9, at + 18), fill=GREEN)


def _page(pen: ImageDraw.ImageDraw, desktop: Desktop) -> None:
    left, top, right, bottom = 810, 60, 1900, 1050
    pen.rectangle((left, top, right, bottom), fill=PAPER)
    pen.rectangle((left, top, right, top + 60), fill=SHADE)
    _write(pen, (left + 20, top + 20), "https://example.org/pictures", INK)
    for line in range(36):
        number = desktop.page_line + line
        at = top + 80 + 24 * line
        if number % 9 == 0:
            tone = random.Random(number).randrange(80, 200)
            pen.rectangle((left + 40, at, right - 40, at + 20), fill=(tone, tone, 230))
        else:
            _write(pen, (left + 40, at), _line(number + 500, 14), INK)
    fill = (60, 120, 220) if desktop.hovered else (120, 160, 220)
    pen.rectangle((1640, bottom - 50, 1860, bottom - 14), fill=fill)
    _write(pen, (1690, bottom - 42), "Read on", PAPER)


def _line(number: int, words: int) -> str:
    return " ".join(random.Random(f"line {number}").choices(TEXT.split(), k=words))


def _write(
    pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, ink: tuple[int, int, int]
) -> None:
    pen.text(at, text, fill=ink, font=FONT)


FONT = ImageFont.load_default(16)
