"""Several servers behind `saccade route`: an image costs its work once in all of them, clients see
one server, and a server that dies takes nothing along but what it was answering.
"""

from __future__ import annotations

import base64
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import psutil
import pytest
from blake3 import blake3

from saccade.route.rank import rank
from tests.checkpoints import picture
from tests.e2e.server import Server, routing, serving
from tests.e2e.test_serve import image_part, png, text_part, user

OPTIONS = ("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "8192")
ROUNDS = 4
KILLED = -signal.SIGKILL
SOON = 5.0
"""Seconds within which every client knows how its request has ended."""


@dataclass(frozen=True)
class Fleet:
    """Servers and the router in front of them. The last server is to be killed."""

    workers: Sequence[Server]
    router: Server

    @property
    def encodes(self) -> list[float]:
        return [worker.metric("saccade_images_encoded_total") for worker in self.workers]

    def client(self, way: str = "routed") -> openai.OpenAI:
        url = self.router.url if way == "routed" else self.workers[0].url
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def start(folder: Path, logs: Path, stack: ExitStack, *options: str, doomed: int = 1) -> Fleet:
    """Two servers, each with files of its own, of which the last `doomed` are killed at the end."""
    contexts = [
        serving(
            folder,
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


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_vl")


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield start(folder, tmp_path_factory.mktemp("log"), stack)


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


def chats(url: str, images: Sequence[np.ndarray], abreast: int = 4) -> None:
    """One about each image."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    with ThreadPoolExecutor(abreast) as pool:
        list(pool.map(lambda pixels: chat(client, pixels), images))


def shared_out(fleet: Fleet, each: int, seed: int) -> list[np.ndarray]:
    """New images, so many for each server, in turns: servers have other names in every run."""
    found: dict[str, list[np.ndarray]] = {worker.url: [] for worker in fleet.workers}
    while any(len(images) < each for images in found.values()):
        pixels = picture(64, 64, seed=(seed := seed + 1))
        data = base64.b64decode(png(pixels).partition(",")[2])
        found[rank([blake3(data).digest()], [*found], {})[0]].append(pixels)
    return [pixels for turn in zip(*found.values(), strict=False) for pixels in turn][: 2 * each]


# ---- what a fleet is worth


def test_every_image_of_every_chat_is_encoded_once_in_the_whole_fleet(fleet: Fleet) -> None:
    before = fleet.encodes
    chats(fleet.router.url, shared_out(fleet, 4, seed=1000))
    encoded = [now - then for now, then in zip(fleet.encodes, before, strict=True)]
    assert encoded == [4, 4]


# ---- one server or several: the same to clients

ways = pytest.mark.parametrize(
    "way",
    # That one server keeps to this, tests of its own show, too.
    [pytest.param("direct", marks=pytest.mark.slow), "routed"],
)


@ways
def test_a_stream_is_the_answer_piece_by_piece(fleet: Fleet, way: str) -> None:
    messages = [user(image_part(picture(64, 64, seed=1)), text_part("go on"))]
    whole = ask(fleet.client(way), messages, max_tokens=12).choices[0].message.content
    stream = ask(fleet.client(way), messages, max_tokens=12, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 2 and "".join(pieces) == whole


@ways
def test_a_stream_comes_as_it_is_made(fleet: Fleet, way: str) -> None:
    """The first words are there long before the last: while the request still runs."""
    body = {"ignore_eos": True}
    messages = [user(text_part("go on"))]
    client = fleet.client(way)
    with ask(client, messages, max_tokens=1500, stream=True, extra_body=body) as stream:
        next(iter(stream))
        assert sum(each.metric("saccade_requests_running") for each in fleet.workers) == 1
    for worker in fleet.workers:  # and who leaves is not answered any more
        worker.wait_for_metric("saccade_requests_running", 0)
    aborted = (each.metric("saccade_requests_total", outcome="abort") for each in fleet.workers)
    assert sum(aborted) >= 1


@ways
def test_errors_are_the_servers_own(fleet: Fleet, way: str) -> None:
    client = fleet.client(way)
    with pytest.raises(openai.NotFoundError, match="'nope' does not exist"):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [user(image_part(picture(8, 8, seed=1)))], n=-1)
    assert caught.value.param == "n"
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [user(broken)])
    assert caught.value.param == "messages[0].content[0]"
    url = str(client.base_url)
    bad = httpx.post(f"{url}chat/completions", content=b"{", headers={"x-request-id": "mine"})
    assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"
    assert bad.headers["x-request-id"] == "mine"
    assert httpx.get(f"{url}nowhere").json()["error"]["code"] == "not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_" + "0" * 48)


@ways
def test_the_anthropic_sdk_is_answered(fleet: Fleet, way: str) -> None:
    url = fleet.router.url if way == "routed" else fleet.workers[0].url
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    data = png(picture(64, 64, seed=3)).partition(",")[2]
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    messages: Any = [{"role": "user", "content": content}]
    answer = client.messages.create(model="tiny", max_tokens=4, messages=messages)
    with client.messages.stream(model="tiny", max_tokens=4, messages=messages) as stream:
        assert len(list(stream)) > 2
    assert answer.usage.output_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nope", max_tokens=4, messages=messages)


@ways
def test_an_uploaded_file_is_there_whoever_is_asked(fleet: Fleet, way: str) -> None:
    client = fleet.client(way)
    pixels = picture(64, 64, seed=400 + (way == "routed"))
    data = base64.b64decode(png(pixels).partition(",")[2])
    file = client.files.create(file=("a.png", data), purpose="vision")
    part = {"type": "file", "file": {"file_id": file.id}}
    before = sum(fleet.encodes)
    for text in ("what?", "which?", "why?"):
        ask(client, [user(part, text_part(text))])
    inline = image_part(pixels)
    ask(client, [user(inline, text_part("the same?"))])
    assert sum(fleet.encodes) - before == 1, "by its id or by its bytes, an image is one image"
    assert client.files.content(file.id).read() == data
    assert file.id in [each.id for each in client.files.list().data]
    if way == "routed":
        for worker in fleet.workers:
            assert httpx.get(f"{worker.url}/v1/files/{file.id}").json()["filename"] == "a.png"
    client.files.delete(file.id)
    for url in (str(client.base_url), *(f"{each.url}/v1/" for each in fleet.workers)):
        assert httpx.get(f"{url}files/{file.id}").status_code == 404
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("a.png", b"no picture"), purpose="vision")


@ways
def test_a_response_goes_on_where_it_is_kept(fleet: Fleet, way: str) -> None:
    client = fleet.client(way)
    for start in ("a", "b", "c", "d"):
        response = client.responses.create(model="tiny", input=start, max_output_tokens=4)
        for _ in range(3):
            response = client.responses.create(
                model="tiny", input="go on", max_output_tokens=4, previous_response_id=response.id
            )
        assert client.responses.retrieve(response.id).id == response.id
        assert len(client.responses.input_items.list(response.id).data) == 7
        client.responses.delete(response.id)


def test_a_large_body_goes_through_and_one_that_is_too_large_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    client, filler = fleet.client(), {"user": "x" * 3_000_000}
    assert ask(client, [user(text_part("what?"))], extra_body=filler).choices
    with routing(fleet.workers, tmp_path, "--max-body-mb", "1", "--max-requests", "1") as small:
        url = f"{small.url}/v1/chat/completions"
        refused = httpx.post(url, json={"messages": [], **filler})
        assert refused.status_code == 413 and "--max-body-mb" in refused.json()["error"]["message"]
        with httpx.stream("POST", url, content=iter([b"{"] + [b" " * 100_000] * 20)) as streamed:
            assert streamed.status_code == 413
        with socket.create_connection(("127.0.0.1", httpx.URL(small.url).port or 0)) as slow:
            slow.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
            )
            time.sleep(0.3)
            full = httpx.post(url, json={})
            assert full.status_code == 429 and full.headers["retry-after"]
        assert httpx.get(f"{small.url}/health").is_success


def test_health_and_metrics_are_the_routers_own(fleet: Fleet) -> None:
    health = httpx.get(f"{fleet.router.url}/health").json()
    assert [each["url"] for each in health["workers"]] == [each.url for each in fleet.workers]
    assert {each["status"] for each in health["workers"]} == {"ready"} == {health["status"]}
    told = httpx.get(f"{fleet.router.url}/metrics").text
    assert "saccade_route_rank_seconds_bucket" in told and "saccade_ttft" not in told
    assert fleet.router.metric("saccade_request_bytes_held") == 0


def test_a_command_to_forget_reaches_every_server(fleet: Fleet) -> None:
    before = sum(fleet.encodes)
    images = [picture(64, 64, seed=300 + number) for number in range(4)]
    for _ in range(2):
        for pixels in images:
            chat(fleet.client(), pixels, rounds=1)
        assert httpx.post(f"{fleet.router.url}/flush_cache").is_success
    assert sum(fleet.encodes) - before == 8


# ---- death; the last test, for it leaves one server


def outcome(client: openai.OpenAI, pixels: np.ndarray, stream: bool, deaths: list[float]) -> str:
    """How one request of many ended: with an answer, or with a typed error soon after a death."""
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
        assert time.monotonic() - deaths[0] < SOON
        return "error"


def test_a_server_that_is_killed_takes_nothing_along_but_what_it_was_answering(
    fleet: Fleet,
) -> None:
    client, doomed = fleet.client(), fleet.workers[-1]
    family = psutil.Process(doomed.process.pid).children(recursive=True)
    deaths: list[float] = []
    images = shared_out(fleet, 5, seed=2000)
    began = [chat(client, pixels, rounds=1) for pixels in images[:4]]
    with ThreadPoolExecutor(10) as pool:
        asking = [
            pool.submit(outcome, client, pixels, number // 2 % 2 == 0, deaths)
            for number, pixels in enumerate(images)
        ]
        deadline = time.monotonic() + 20
        while not doomed.metric("saccade_requests_running"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        deaths.append(time.monotonic())
        doomed.process.kill()
        ends = [each.result(timeout=60) for each in asking]
    assert ends.count("answer") >= 1
    assert {*ends[2::4], *ends[3::4]} == {"answer"}, "what had not begun is answered elsewhere"
    for messages in began:
        assert ask(client, messages).choices
    assert not psutil.wait_procs(family, timeout=10)[1]
    states = httpx.get(f"{fleet.router.url}/health").json()["workers"]
    assert [each["status"] for each in states] == ["ready", "down"]
