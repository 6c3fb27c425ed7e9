"""Run the anthropic SDK's loop for its computer toolset with an open model.

    saccade serve MODEL &
    pip install 'anthropic>=2.12' pillow
    python examples/computer_use/with_anthropic.py "Write hello into the field, and save it."

The toolset below implements what the SDK requires: a method for each action. Only the base URL
differs from a loop with Anthropic's models. `--must-act` makes every turn act, for models that are
not trained for it, such as the demo model.
"""

from __future__ import annotations

import argparse
from typing import Any

import anthropic
from anthropic.tools.computer import (
    BetaAbstractComputerToolset20260801,
    BetaComputerCursorPositionResult,
    BetaScreenshotResult,
)
from desktop import Desktop

NOTCH = 100


class Toolset(BetaAbstractComputerToolset20260801):
    """Applies a model's actions to the desktop."""

    def __init__(self, desktop: Desktop) -> None:
        super().__init__(confirm=lambda _: True)
        self.desktop = desktop

    def screenshot(self, context: Any, input: Any) -> BetaScreenshotResult:  # noqa: ARG002
        return BetaScreenshotResult(data=self.desktop.png())

    def zoom(self, context: Any, input: Any) -> BetaScreenshotResult:  # noqa: ARG002
        return BetaScreenshotResult(data=self.desktop.png(input.region))

    def cursor_position(self, context: Any, input: Any) -> BetaComputerCursorPositionResult:  # noqa: ARG002
        x, y = self.desktop.cursor
        return BetaComputerCursorPositionResult(x=x, y=y)

    def left_click(self, context: Any, input: Any) -> str:  # noqa: ARG002
        return self._click(input)

    def right_click(self, context: Any, input: Any) -> str:  # noqa: ARG002
        return self._click(input, "right")

    def double_click(self, context: Any, input: Any) -> str:  # noqa: ARG002
        return self._click(input, count=2)

    def mouse_move(self, context: Any, input: Any) -> str:  # noqa: ARG002
        return self.desktop.move(*input.coordinate)

    def left_click_drag(self, context: Any, input: Any) -> str:  # noqa: ARG002
        return self.desktop.drag([tuple(input.start_coordinate), tuple(input.coordinate)])

    def scroll(self, context: Any, input: Any) -> str:  # noqa: ARG002
        x, y = input.coordinate or self.desktop.cursor
        down = {"down": 1, "up": -1}.get(input.scroll_direction, 0) * input.scroll_amount
        return self.desktop.scroll(x, y, down * NOTCH)

    def type(self, context: Any, input: Any) -> str:  # noqa: ARG002
        return self.desktop.type(input.text)

    def key(self, context: Any, input: Any) -> str:  # noqa: ARG002
        return self.desktop.key(input.text)

    def wait(self, context: Any, input: Any) -> str:  # noqa: ARG002
        return self.desktop.wait(input.duration)

    def _click(self, input: Any, button: str = "left", count: int = 1) -> str:
        x, y = input.coordinate or self.desktop.cursor
        return self.desktop.click(x, y, button, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", default="Write hello into the field, and save it.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's URL")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--must-act", action="store_true")
    given = parser.parse_args()
    desktop = Desktop()
    client = anthropic.Anthropic(base_url=given.base_url, api_key="none")
    source = {"type": "base64", "media_type": "image/png", "data": desktop.png()}
    task: Any = [{"type": "text", "text": given.task}, {"type": "image", "source": source}]
    must = {"type": "any", "disable_parallel_tool_use": True}
    more: Any = {"tool_choice": must} if given.must_act else {}
    runner = client.beta.messages.tool_runner(
        model=given.model,
        max_tokens=1000,
        messages=[{"role": "user", "content": task}],
        tools=[Toolset(desktop)],
        max_iterations=given.steps,
        **more,
    )
    said = ""
    try:
        for answer in runner:
            said = "".join(block.text for block in answer.content if block.type == "text")
    except anthropic.APIConnectionError as error:
        raise SystemExit(f"nobody answers at {error.request.url}: is `saccade serve` up?") from None
    print(*desktop.log, said, sep="\n")


if __name__ == "__main__":
    main()
