"""An agent that looks at a screen: a loop around the openai SDK, with images in tool results.

    saccade serve MODEL &
    pip install openai pillow
    python examples/agent/screen_agent.py "Which button is red? Click it."

The screen is drawn here, so that the example needs no display. For a real one, let `screenshot`
return `PIL.ImageGrab.grab()`. `--force N` makes the first N turns call a tool, for models that are
not trained for it. Each turn sends the entire conversation again, and the server finds the images
of earlier turns in its caches, as the last column shows. With `--keep N`, only the newest N
screenshots are sent. Once the server has detected this, it computes each next prompt while a tool
runs ("ready"). `--pause` simulates the duration of a real tool in seconds. The agent works with any
OpenAI-compatible server.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import time
from collections.abc import Callable
from typing import Any

import openai
from PIL import Image, ImageDraw

MAX_TURNS = 8
BUTTONS = {"red": (60, 60), "green": (220, 60), "blue": (140, 170)}
HALF_WIDTH, HALF_HEIGHT = 50, 24

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "screenshot",
            "description": "Take a picture of the screen, 320 x 240 pixels.",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "click",
            "description": "Click at a point of the screen, and take a picture of it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer", "minimum": 0, "maximum": 319},
                    "y": {"type": "integer", "minimum": 0, "maximum": 239},
                },
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
    },
]


class Screen:
    """A screen with three buttons, and the location of the last click."""

    def __init__(self) -> None:
        self._clicked: tuple[int, int] | None = None

    def screenshot(self) -> list[Any]:
        """Return the screen as a message's content."""
        image = Image.new("RGB", (320, 240), "white")
        draw = ImageDraw.Draw(image)
        for color, (x, y) in BUTTONS.items():
            box = (x - HALF_WIDTH, y - HALF_HEIGHT, x + HALF_WIDTH, y + HALF_HEIGHT)
            draw.rounded_rectangle(box, 8, fill=color)
        if self._clicked is not None:
            draw.circle(self._clicked, 5, fill="black")
        file = io.BytesIO()
        image.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        return [{"type": "image_url", "image_url": {"url": url}}]

    def click(self, x: int, y: int) -> list[Any]:
        """Click, and return the screen afterwards."""
        self._clicked = (x, y)
        hit = [
            color
            for color, (left, top) in BUTTONS.items()
            if abs(x - left) <= HALF_WIDTH and abs(y - top) <= HALF_HEIGHT
        ]
        said = f"clicked the {hit[0]} button" if hit else "clicked beside the buttons"
        return [{"type": "text", "text": said}, *self.screenshot()]


def run(call: Any, tools: dict[str, Callable[..., list[Any]]]) -> list[Any]:
    """Return the result of a tool call, or an error message for the model."""
    try:
        return tools[call.function.name](**json.loads(call.function.arguments))
    except (KeyError, TypeError, ValueError) as error:
        return [{"type": "text", "text": f"error: {error}"}]


def trimmed(messages: list[Any], keep: int) -> list[Any]:
    """Return the messages with all but the newest `keep` screenshots replaced by a text."""
    shown = [m for m in messages if isinstance(m, dict) and m["role"] == "tool"]
    old = [id(message) for message in shown[: max(0, len(shown) - keep)]]
    return [{**m, "content": "an old screenshot"} if id(m) in old else m for m in messages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", nargs="?", default="Which button is red? Click it.")
    parser.add_argument("--force", type=int, default=0, metavar="N")
    parser.add_argument("--keep", type=int, default=MAX_TURNS, metavar="N")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's URL")
    options = parser.parse_intermixed_args()  # allows options before, between and after the goal
    client = openai.OpenAI(
        base_url=f"{options.base_url.rstrip('/').removesuffix('/v1')}/v1", api_key="none"
    )
    model = client.models.list().data[0].id
    screen = Screen()
    tools = {"screenshot": screen.screenshot, "click": screen.click}
    messages: list[Any] = [{"role": "user", "content": options.task}]
    for turn in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=trimmed(messages, options.keep),
            tools=TOOLS,
            tool_choice="required" if turn < options.force else "auto",
            parallel_tool_calls=False,
            max_tokens=512,
        )
        message, usage = answer.choices[0].message, answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        details = usage.prompt_tokens_details
        known = f"{details.cached_tokens} of {usage.prompt_tokens} tokens known"
        if ready := (details.model_extra or {}).get("prepared_tokens"):
            known += f", {ready} of them made ready"
        messages.append(message)
        for call in message.tool_calls or ():
            print(f"{turn}  {call.function.name} {call.function.arguments}  ({known})")
            content = run(call, tools)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            time.sleep(options.pause)
        if not message.tool_calls:
            print(f"{turn}  {message.content}  ({known})")
            return
    print(f"no answer in {MAX_TURNS} turns")


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        raise SystemExit(f"nobody answers at {error.request.url}: is `saccade serve` up?") from None
