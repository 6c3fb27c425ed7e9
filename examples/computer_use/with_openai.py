"""Run the openai SDK's loop for its `computer` tool with an open model.

    saccade serve MODEL &
    pip install 'openai>=3.52' pillow
    python examples/computer_use/with_openai.py "Write hello into the field, and save it."

The driver below implements what the SDK requires: a method for each action. Only the base URL
differs from a loop with OpenAI's models. `--must-act` makes the first turn act, for models that are
not trained for it, such as the demo model.
"""

from __future__ import annotations

import argparse
from typing import Any

import openai
from desktop import Desktop
from openai.lib.computer import ComputerDriver, ComputerToolset, ComputerUseError, Screenshot

BUTTONS = {"wheel": "middle"}


class Driver(ComputerDriver):
    """Applies a model's actions to the desktop."""

    def __init__(self, desktop: Desktop) -> None:
        self.desktop = desktop

    def click(self, action: Any) -> None:
        self.desktop.click(action.x, action.y, BUTTONS.get(action.button, action.button))

    def double_click(self, action: Any) -> None:
        self.desktop.click(action.x, action.y, count=2)

    def drag(self, action: Any) -> None:
        self.desktop.drag([(point.x, point.y) for point in action.path])

    def keypress(self, action: Any) -> None:
        self.desktop.key("+".join(action.keys))

    def move(self, action: Any) -> None:
        self.desktop.move(action.x, action.y)

    def scroll(self, action: Any) -> None:
        self.desktop.scroll(action.x, action.y, action.scroll_y)

    def type(self, action: Any) -> None:
        self.desktop.type(action.text)

    def wait(self, action: Any) -> None:  # noqa: ARG002
        self.desktop.wait(1)

    def screenshot(self) -> Screenshot:
        url = f"data:image/png;base64,{self.desktop.png()}"
        return {"type": "computer_screenshot", "image_url": url}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", default="Write hello into the field, and save it.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's URL")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--must-act", action="store_true")
    given = parser.parse_args()
    desktop = Desktop()
    client = openai.OpenAI(base_url=f"{given.base_url}/v1", api_key="none")
    seen = {"type": "input_image", "image_url": f"data:image/png;base64,{desktop.png()}"}
    task = {"role": "user", "content": [{"type": "input_text", "text": given.task}, seen]}
    request: Any = {
        "model": given.model,
        "input": [task],
        "tools": [{"type": "computer"}],
        "tool_choice": "required" if given.must_act else "auto",
        "parallel_tool_calls": not given.must_act,
        "max_output_tokens": 1000,
    }
    try:
        response = ComputerToolset(Driver(desktop)).run(client, request, max_steps=given.steps)
        said = response.output_text
    except ComputerUseError as stopped:
        said = f"stopped: {stopped}"
    except openai.APIConnectionError as error:
        raise SystemExit(f"nobody answers at {error.request.url}: is `saccade serve` up?") from None
    print(*desktop.log, said, sep="\n")


if __name__ == "__main__":
    main()
