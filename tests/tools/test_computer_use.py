"""Both vendors' loops for computers, as their SDKs publish them, do a task on the drawn desktop of
the examples. The engine is the double that says what a model would. It acts as a Qwen3-VL does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.text.answer.answer_format import FORMATS, AnswerFormat
from tests.helpers.served import TOKENIZER, Served, serving

pytestmark = pytest.mark.more

EXAMPLES = Path(__file__).parents[2] / "examples" / "computer_use"
WIDTH, HEIGHT = 640, 480


def at(x: int, y: int) -> list[int]:
    """A pixel of the desktop, in thousandths."""
    return [round(x * 1000 / WIDTH), round(y * 1000 / HEIGHT)]


def acts(**arguments: object) -> str:
    call = {"name": "computer_use", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


SCRIPT = [
    acts(action="screenshot"),
    acts(action="left_click", coordinate=at(41, 61)),
    acts(action="type", text="hello") + "\n" + acts(action="key", keys=["backspace"]),
    acts(action="scroll", coordinate=at(500, 200), pixels=-300),
    acts(action="mouse_move", coordinate=at(100, 240))
    + "\n"
    + acts(action="left_click_drag", coordinate=at(200, 300)),
    acts(action="left_click", coordinate=at(159, 439)),
    "It is saved.",
]
DONE = [
    "left click x1 on the text field",
    "typed 'hello'",
    "scrolled the list to 300",
    "moved to 100, 240",
    "dragged the note to (160, 260)",
    "left click x1 on Save",
    "It is saved.",
]


@pytest.fixture(scope="module")
def model() -> Iterator[Served]:
    with serving(answer_format=AnswerFormat(FORMATS["hermes"]), context=32_768) as served:
        yield served


@pytest.mark.parametrize("loop", ["with_openai.py", "with_anthropic.py"])
def test_a_published_loop_does_a_task(model: Served, loop: str) -> None:
    left = [TOKENIZER.encode(each) for each in SCRIPT]
    model.engine.reply = lambda _: left.pop(0)
    command = [sys.executable, str(EXAMPLES / loop), "--base-url", model.address]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert [line for line in told if "press" not in line] == DONE
    assert [line.lower() for line in told if "press" in line] == ["pressed backspace"]
    assert not left
