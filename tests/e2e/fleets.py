"""Several real servers and a router in front of them, and what clients do with them.

Owns how they are started, and how the counts of several servers are one. Knows nothing of Ray.
"""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
from blake3 import blake3

from saccade.edge.rank import rank
from saccade_bench.fixtures.server import Server, routing, serving
from tests.fixtures.tiny import picture
from tests.helpers.images import image_part, png_url, text_part, user

OPTIONS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "8192"),
    *("--max-running-requests", "16"),
)
ROUNDS = 4
KILLED = -signal.SIGKILL
COUNT_SECONDS = 20


@dataclass(frozen=True)
class Asked:
    """What clients see, one server or several: an address. Counts are those of all behind it."""

    url: str
    workers: Sequence[Server]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric."""
        return sum(each.metric(name, **labels) for each in self.workers)

    def wait_for_metric(self, name: str, value: float, **labels: str) -> None:
        """Until it has a value."""
        deadline = time.monotonic() + COUNT_SECONDS
        while (found := self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
            time.sleep(0.02)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@dataclass(frozen=True)
class Fleet:
    """Servers and the router in front of them. The last server is to be killed."""

    workers: Sequence[Server]
    router: Server

    @property
    def encodes(self) -> list[float]:
        return [worker.metric("saccade_images_encoded_total") for worker in self.workers]

    @property
    def direct(self) -> Asked:
        """The first server alone."""
        return Asked(self.workers[0].url, self.workers[:1])

    @property
    def routed(self) -> Asked:
        return Asked(self.router.url, self.workers)

    def client(self) -> openai.OpenAI:
        return self.routed.client


def start(model: str | Path, logs: Path, stack: ExitStack, *options: str, doomed: int = 1) -> Fleet:
    """Two servers, each with files of its own, of which the last `doomed` are killed at the end."""
    contexts = [
        serving(
            model,
            logs,
            *(*OPTIONS, "--files-dir", str(logs / f"files {number}"), *options),
            status=KILLED if number >= 2 - doomed else 0,
        )
        for number in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(stack.enter_context, contexts))
    for worker in workers[2 - doomed :]:
        stack.callback(worker.process.kill)
    return Fleet(workers, stack.enter_context(routing(workers, logs)))


def ask(client: openai.OpenAI, messages: Sequence[Any], **options: Any) -> Any:
    create: Any = client.chat.completions.create
    settings = {"max_tokens": 4, "temperature": 0, **options}
    return create(model="tiny", messages=messages, **settings)


def chat(client: openai.OpenAI, pixels: np.ndarray, rounds: int = ROUNDS) -> list[Any]:
    """A chat about one image; its messages."""
    messages: list[Any] = [user(image_part(pixels), text_part("what?"))]
    for number in range(rounds):
        answer = ask(client, messages).choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, user(text_part(f"and {number}?"))]
    return messages


def chats(url: str, images: Sequence[np.ndarray], abreast: int = 4, rounds: int = ROUNDS) -> None:
    """One about each image."""
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(abreast) as pool,
    ):
        list(pool.map(lambda pixels: chat(client, pixels, rounds), images))


def shared_out(fleet: Fleet, each: int, seed: int) -> list[np.ndarray]:
    """New images, so many for each server, in turns: servers have other names in every run."""
    found: dict[str, list[np.ndarray]] = {worker.url: [] for worker in fleet.workers}
    while any(len(images) < each for images in found.values()):
        pixels = picture(64, 64, seed=(seed := seed + 1))
        data = base64.b64decode(png_url(pixels).partition(",")[2])
        found[rank([blake3(data).digest()], [*found], {})[0]].append(pixels)
    return [pixels for turn in zip(*found.values(), strict=False) for pixels in turn][: 2 * each]


def outcome(client: openai.OpenAI, pixels: np.ndarray, stream: bool, deaths: list[float]) -> str:
    """How one request of many ended: with an answer, or with a typed error after a death."""
    try:
        options: Any = {"max_tokens": 300, "extra_body": {"ignore_eos": True}, "stream": stream}
        answer = ask(client, [user(image_part(pixels), text_part("go on"))], **options)
        if stream:
            for _ in answer:
                pass
        return "answer"
    except (openai.InternalServerError, openai.APIError) as error:
        assert isinstance(error, openai.APIError) and error.body, "not a broken connection"
        body: Any = error.body
        assert body["code"] == "worker_lost" and deaths
        return "error"
