"""`saccade demo`: serve the demo model, ask it about three images, show the answers and cache hits,
and continue to serve.

The demo is an ordinary HTTP client: everything that it shows is from the API.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from saccade.demo import PICTURES
from saccade.ipc.own_server import free_port, own_server, wait_until_ready

SCRIPT = Path(sys.executable).with_name("saccade")
"""The path of the `saccade` command in the environment of this Python."""
ENCODED = ("none", "pixels")
"""Values of `found` in a trace for images that were encoded."""


@dataclass(frozen=True)
class DemoTurn:
    """A question of the demo's chat, with its correct answer."""

    question: str
    answer: str  # the only answer that counts as right
    images: tuple[Path, ...] = ()  # sent with the question


QUESTIONS = (
    DemoTurn("What number is in the picture?", "The number is 9534.", PICTURES[:1]),
    DemoTurn("Describe picture 2.", "Picture 2 shows a red heart and a blue star.", PICTURES[1:2]),
    DemoTurn("What colour is the star in picture 3?", "The star is green.", PICTURES[2:]),
    DemoTurn("Which picture shows the white square?", "The white square is in picture 3."),
    DemoTurn("What is the number in picture 1?", "The number is 9534."),
    DemoTurn(
        "What do you see in picture 3?",
        "Picture 3 shows a purple square, a green star and a white square.",
    ),
)
"""The questions of the demo's only chat. Later ones refer to earlier images.

They are limited to tasks that the model does well (see its model card): text in the images is
large, and no objects are counted.
"""


@dataclass(frozen=True)
class DemoAnswer:
    """The answer to one question, with its latency and cache hits."""

    text: str
    ttft: float  # seconds to the first text
    total: float  # seconds to the end of the answer
    prompt_tokens: int
    cached_tokens: int
    encoded: int  # images that were encoded
    reused: int  # images that were cached


def run(
    *,
    port: int = 8000,
    exit_after: bool = False,
    out: Path = Path("out/demo"),
    starter: int | None = None,
) -> int:
    """Run the demo and return the exit status, which is 0 only if all answers were right.

    starter: a pid. The demo also exits when that process does.
    out: the directory to copy the images to.
    """
    console = Console()
    port = free_port(port)
    console.print(f"[bold]saccade serve demo --port {port}[/bold]")
    with (
        own_server("demo", "--port", str(port), starter=starter) as server,
        # No limit: the server ends by itself if its processes stop (--tune step_timeout).
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client,
    ):
        wait_until_ready(str(client.base_url), server)
        right = converse(client, console, QUESTIONS, out)
        if not exit_after:
            serve_on(console, server, port, out)
        return 0 if right else 1


def converse(client: httpx.Client, console: Console, turns: Sequence[DemoTurn], out: Path) -> bool:
    """Ask all questions in one chat. Print each answer, then a table of their costs. Returns True
    if all answers were right.
    """
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    messages: list[dict[str, Any]] = []
    rows: list[tuple[DemoTurn, DemoAnswer]] = []
    images = 0
    for turn in turns:
        for image in turn.images:
            images += 1
            show(console, image, out / f"picture-{images}.png", images)
        messages.append(user_message(turn))
        answer = ask(client, model, messages)
        messages.append({"role": "assistant", "content": answer.text})
        rows.append((turn, answer))
        mark = (
            "[green]right[/green]"
            if answer.text == turn.answer
            else f"[red]wrong, expected:[/red] {turn.answer}"
        )
        console.print(
            f"[bold cyan]Q[/bold cyan] {turn.question}\n[bold cyan]A[/bold cyan] {answer.text} "
            f" {mark}\n"
        )
    print_table(console, [answer for _, answer in rows])
    return all(answer.text == turn.answer for turn, answer in rows)


def user_message(turn: DemoTurn) -> dict[str, Any]:
    """Convert a question to a message in OpenAI's format: its images, then the text."""
    if not turn.images:
        return {"role": "user", "content": turn.question}
    encoded = [b64encode(image.read_bytes()).decode() for image in turn.images]
    urls = [f"data:image/png;base64,{each}" for each in encoded]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*images, {"type": "text", "text": turn.question}]}


def ask(client: httpx.Client, model: str, messages: Sequence[dict[str, Any]]) -> DemoAnswer:
    """Request one greedy answer as a stream, and measure it. Raises httpx.HTTPStatusError for an
    error response.
    """
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
        "saccade": {"trace": True},
    }
    # Stream the answer, and measure the time to its first text.
    start = time.perf_counter()
    first, text = 0.0, ""
    usage: dict[str, Any] = {}
    images: list[dict[str, Any]] = []
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            response.read()
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        for event in events(response):
            usage = event.get("usage") or usage
            images = event.get("saccade", {}).get("images", images)
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.perf_counter() - start
                    text += piece
    total = time.perf_counter() - start
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    encoded = sum(image["found"] in ENCODED for image in images)
    return DemoAnswer(
        text.strip(),
        first,
        total,
        usage["prompt_tokens"],
        cached,
        encoded,
        len(images) - encoded,
    )


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def print_table(console: Console, answers: Sequence[DemoAnswer]) -> None:
    """Print the latency, token counts and cache hits of each question, in a table that fits in 80
    columns.
    """
    table = Table("turn", "TTFT ms", "prompt tokens", "cached", "encoded", "reused")
    for index, answer in enumerate(answers, 1):
        figures = (
            f"{answer.ttft * 1000:.0f}",
            answer.prompt_tokens,
            answer.cached_tokens,
            answer.encoded,
            answer.reused,
        )
        table.add_row(str(index), *map(str, figures))
    console.print(table)
    console.print(
        "encoded: images run through the vision encoder; reused: cached images, which cost only a "
        "hash.\n"
    )


def show(console: Console, source: Path, path: Path, number: int) -> None:
    """Copy the image `source` to `path`, and draw it if the terminal supports true color."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.read_bytes())
    image = Image.open(path)
    if console.is_terminal and console.color_system == "truecolor":
        console.print(half_blocks(image, width=44))
    console.print(f"[dim]picture {number}: {path} ({image.width} x {image.height})[/dim]")


def half_blocks(image: Image.Image, width: int) -> Text:
    """Convert an image to text of `width` characters per line. Each character shows two pixels, one
    above the other.
    """
    height = max(1, round(image.height * width / image.width / 2))
    small = image.convert("RGB").resize((width, 2 * height), Image.Resampling.LANCZOS)
    text = Text()
    for y in range(0, 2 * height, 2):
        for x in range(width):
            upper, lower = small.getpixel((x, y)), small.getpixel((x, y + 1))
            assert isinstance(upper, tuple)
            assert isinstance(lower, tuple)
            text.append(
                "▀",
                f"rgb({upper[0]},{upper[1]},{upper[2]}) on rgb({lower[0]},{lower[1]},{lower[2]})",
            )
        text.append("\n")
    return text


def serve_on(console: Console, server: subprocess.Popen[bytes], port: int, out: Path) -> None:
    """Print the server's address, and wait for Ctrl-C or until the server exits."""
    url = f"http://127.0.0.1:{port}"
    words = (*program(), "chat", "--base-url", f"{url}/v1", "--image", str(out / "picture-2.png"))
    line = escape(shlex.join((*words, "Describe the picture.")))
    told = f"[bold]Serving at {url}/v1[/bold] until Ctrl-C. Open {url}/ in a browser, or type:"
    console.print(f"{told}\n  {line}", soft_wrap=True)
    with suppress(KeyboardInterrupt):
        server.wait()


def program(path: Path = SCRIPT) -> tuple[str, ...]:
    """Return the command, as a tuple of arguments, with which a user in this directory can run
    `saccade`.

    path: where installers put the script.
    """
    if shutil.which("saccade") == str(path):
        return ("saccade",)
    if not path.exists():
        return (sys.executable, "-m", "saccade")
    return (str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path),)
