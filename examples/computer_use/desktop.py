"""A simulated desktop, so that the examples need no display: two buttons, a text field, a
scrollable list, and a note that can be dragged.

For a real desktop, replace the class by your own with the same methods.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from PIL import Image, ImageDraw

WIDTH, HEIGHT = 640, 480
Box = tuple[int, int, int, int]
BUTTONS: dict[str, Box] = {"Save": (40, 400, 160, 440), "Clear": (200, 400, 320, 440)}
FIELD: Box = (40, 60, 360, 92)
LIST: Box = (420, 60, 600, 360)
ROW = 30
NOTE_SIZE = 80


class Desktop:
    """The desktop. `log` describes all actions and their results."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.text = ""
        self.saved = ""
        self.focused = False
        self.scrolled = 0
        self.note = (60, 200)
        self.cursor = (WIDTH // 2, HEIGHT // 2)

    # ---- actions

    def click(self, x: int, y: int, button: str = "left", count: int = 1) -> str:
        """Click, and return a description of what was hit."""
        self.cursor = (x, y)
        hit = next((name for name, box in BUTTONS.items() if _within(box, x, y)), "")
        self.focused = _within(FIELD, x, y)
        if hit == "Save":
            self.saved = self.text
        elif hit == "Clear":
            self.text = ""
        return self._note(f"{button} click x{count} on {hit or self._under(x, y)}")

    def move(self, x: int, y: int) -> str:
        self.cursor = (x, y)
        return self._note(f"moved to {x}, {y}")

    def drag(self, path: Sequence[tuple[int, int]]) -> str:
        """Drag from the path's first point to its last, and return what was dragged."""
        (x0, y0), (x1, y1) = path[0], path[-1]
        self.cursor = (x1, y1)
        left, top = self.note
        if not _within((left, top, left + NOTE_SIZE, top + NOTE_SIZE), x0, y0):
            return self._note("dragged nothing")
        self.note = (left + x1 - x0, top + y1 - y0)
        return self._note(f"dragged the note to {self.note}")

    def scroll(self, x: int, y: int, down: int) -> str:
        """Scroll the list by `down` pixels if it is at this point."""
        self.cursor = (x, y)
        if not _within(LIST, x, y):
            return self._note("scrolled nothing")
        self.scrolled = max(0, self.scrolled + down)
        return self._note(f"scrolled the list to {self.scrolled}")

    def type(self, text: str) -> str:
        if self.focused:
            self.text += text
        return self._note(f"typed {text!r}" if self.focused else f"typed {text!r} to nobody")

    def key(self, keys: str) -> str:
        if self.focused and keys.lower() == "backspace":
            self.text = self.text[:-1]
        return self._note(f"pressed {keys}")

    def wait(self, seconds: float) -> str:
        return self._note(f"waited {seconds:g} s")

    # ---- screenshots

    def image(self) -> Image.Image:
        """Draw the screen."""
        image = Image.new("RGB", (WIDTH, HEIGHT), "#2f4858")
        draw = ImageDraw.Draw(image)
        draw.rectangle(FIELD, fill="white", outline="orange" if self.focused else "black", width=2)
        draw.text((FIELD[0] + 8, FIELD[1] + 10), _drawn(self.text)[-40:], fill="black")
        for name, box in BUTTONS.items():
            draw.rectangle(box, fill="#dddddd", outline="black")
            draw.text((box[0] + 40, box[1] + 14), name, fill="black")
        draw.rectangle(LIST, fill="#f5f5dc", outline="black")
        for row in range((LIST[3] - LIST[1]) // ROW):
            name = f"Entry {row + self.scrolled // ROW}"
            draw.text((LIST[0] + 8, LIST[1] + 8 + row * ROW), name, fill="black")
        left, top = self.note
        draw.rectangle((left, top, left + NOTE_SIZE, top + NOTE_SIZE), fill="#ffe066")
        draw.text((40, 450), f"Saved: {_drawn(self.saved)[-60:]}", fill="white")
        return image

    def png(self, region: Sequence[int] | None = None) -> str:
        """Return the screen, or a region of it, as a PNG in base64."""
        image = self.image()
        if region is not None:
            left, top, right, bottom = region
            image = image.crop((left, top, max(left + 1, right), max(top + 1, bottom)))
        file = io.BytesIO()
        image.save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    def _under(self, x: int, y: int) -> str:
        boxes = {"the text field": FIELD, "the list": LIST}
        return next((name for name, box in boxes.items() if _within(box, x, y)), "the desktop")

    def _note(self, words: str) -> str:
        self.log.append(words)
        return words


def _within(box: Box, x: int, y: int) -> bool:
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def _drawn(text: str) -> str:
    """Replace characters that Pillow's built-in font lacks."""
    return text.encode("latin-1", "replace").decode("latin-1").replace("\n", " ")
