"""Write docs/screen.gif, in which the demo model answers questions about a changing screen. Answers
and statistics are from a server that this script starts.

    .venv/bin/python scripts/moving_picture.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, ImageDraw, ImageFont

from saccade.demo import PICTURES
from saccade.demo.run import QUESTIONS, DemoAnswer, DemoTurn, ask, user_message
from saccade.ipc.own_server import free_port, own_server, wait_until_ready

ROOT = Path(__file__).parent.parent
SIZE, SCREEN, LEFT = (720, 262), 240, 264
INK, PALE, PAPER, SEEN, NEW = "#1b1f24", "#6a737d", "#ffffff", "#1a7f37", "#0969da"
TYPED_MS, READ_MS, SHOWN_MS = 90, 2200, 700
COLOURS = 48
CHARACTERS = 4
"""Characters of an answer that appear per frame."""

Asked = Sequence[tuple[DemoTurn, DemoAnswer]]


def converse(turns: Sequence[DemoTurn]) -> Asked:
    """Ask the demo model all turns as one chat."""
    port, messages, asked = free_port(8000), list[dict[str, Any]](), []
    with (
        own_server("demo", "--port", str(port)) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        wait_until_ready(str(client.base_url), server)
        for turn in turns:
            messages.append(user_message(turn))
            answer = ask(client, "demo", messages)
            messages.append({"role": "assistant", "content": answer.text})
            asked.append((turn, answer))
    return asked


def draw(screen: Image.Image, turn: DemoTurn, text: str, answer: DemoAnswer | None) -> Image.Image:
    """Draw a frame. `text` is the answer so far, `answer` the complete one with its statistics."""
    frame = Image.new("RGB", SIZE, PAPER)
    pen, font = ImageDraw.Draw(frame), ImageFont.load_default(17)
    frame.paste(screen.convert("RGB").resize((SCREEN, SCREEN)), (11, 11))
    pen.rectangle((10, 10, SCREEN + 11, SCREEN + 11), outline=PALE)
    pen.text((LEFT, 14), "the screen, watched", PALE, ImageFont.load_default(13))
    pen.multiline_text((LEFT, 44), wrapped(turn.question, font), INK, font)
    pen.multiline_text((LEFT, 100), wrapped(text, font), NEW, font)
    if answer is not None:
        images = f"{answer.encoded} new, {answer.reused} seen before"
        tokens = f"{answer.cached_tokens} of {answer.prompt_tokens} tokens from the cache"
        pen.text((LEFT, 196), f"images: {images}", SEEN, font)
        pen.text((LEFT, 222), f"{tokens}, first one in {1000 * answer.ttft:.0f} ms", SEEN, font)
    return frame


def wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Break a text into lines that fit next to the screen."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= SIZE[0] - LEFT - 12:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def moments(asked: Asked) -> Iterator[tuple[Image.Image, int]]:
    """Yield the frames with their duration in milliseconds."""
    screen = Image.open(PICTURES[0])
    for turn, answer in asked:
        if turn.images:
            screen = Image.open(turn.images[-1])
        yield draw(screen, turn, "", None), SHOWN_MS
        for end in range(CHARACTERS, len(answer.text), CHARACTERS):
            yield draw(screen, turn, answer.text[:end], None), TYPED_MS
        yield draw(screen, turn, answer.text, answer), READ_MS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "screen.gif")
    out: Path = parser.parse_args().out
    asked = converse(QUESTIONS)
    wrong = [turn.question for turn, answer in asked if answer.text != turn.answer]
    if wrong:
        raise SystemExit(f"wrong answers, nothing is written: {', '.join(wrong)}")
    frames, times = zip(*moments(asked), strict=True)
    small = [frame.quantize(COLOURS, dither=Image.Dither.NONE) for frame in frames]
    small[0].save(out, save_all=True, append_images=small[1:], duration=list(times), loop=0)
    print(f"{out}: {len(frames)} frames, {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
