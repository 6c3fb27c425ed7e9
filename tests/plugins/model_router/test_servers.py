"""Two models behind one router, with memory for one: real servers, real answers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from saccade_bench.fixtures.server import Server, running
from tests.helpers.images import png

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

CLIENTS = 6
PROMPTS = ("What is it?", "Say something.", "How many?")
FILE = """
memory = "1GiB"
stay = "0s"
idle = "{idle}"
args = ["--media-workers", "1", "--threads", "1", "--files-dir", "{folder}/files"]
[demo]
model = "demo"
memory = "600MiB"
[tiny]
model = "{tiny}"
memory = "600MiB"
"""


@pytest.fixture(scope="module")
def start(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """`start(idle)`: a context with a router of two models."""

    def start(idle: str = "never") -> Any:
        folder = tmp_path_factory.mktemp("models")
        file = folder / "models.toml"
        file.write_text(FILE.format(idle=idle, folder=folder, tiny=checkpoint("qwen3_vl")))
        return running(folder, "route", "--models", str(file))

    return start


@pytest.fixture(scope="module")
def router(start: Callable[..., Any]) -> Iterator[Server]:
    with start() as router:
        yield router
        servers = processes(router)
    assert servers, "one has run to the end"
    assert not [each for each in servers if alive(each)], "and has ended with the router"


@pytest.fixture
def client(router: Server) -> Iterator[openai.OpenAI]:
    with client_of(router) as client:
        yield client


def client_of(router: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=300)


def processes(router: Server) -> list[psutil.Process]:
    return psutil.Process(router.process.pid).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def server_of(router: Server) -> psutil.Process:
    """The one server that runs."""
    (server,) = psutil.Process(router.process.pid).children()
    return server


def ask(client: openai.OpenAI, model: str, prompt: str, stream: bool = False) -> tuple[str, str]:
    """The model that has answered, and its answer."""
    options: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 16,
        "temperature": 0,
    }
    if not stream:
        answer = client.chat.completions.create(**options)
        return answer.model, answer.choices[0].message.content or ""
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[-1].choices[0].finish_reason is not None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return chunks[0].model, text


def stops(router: Server, model: str, reason: str) -> float:
    return router.metric("saccade_route_model_stops_total", model=model, reason=reason)


def test_two_models_under_load_with_room_for_one(router: Server, client: openai.OpenAI) -> None:
    expected = {
        (model, prompt): ask(client, model, prompt)[1]
        for model, prompt in product(("demo", "tiny"), PROMPTS)
    }
    assert len({expected[model, PROMPTS[0]] for model in ("demo", "tiny")}) == 2
    before = sum(stops(router, model, "evicted") for model in ("demo", "tiny"))
    assert before >= 1

    def work(number: int) -> list[str]:
        order = ("demo", "tiny") if number % 2 else ("tiny", "demo")
        wrong = []
        for model, prompt, stream in product(order, PROMPTS, (False, True)):
            answer = ask(client, model, prompt, stream)
            if answer != (model, expected[model, prompt]):
                wrong.append(f"{model}, {prompt}: {answer}")
        return wrong

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert [*pool.map(work, range(CLIENTS))] == [[]] * CLIENTS, "0 wrong; lost ones raise"
    evicted = sum(stops(router, model, "evicted") for model in ("demo", "tiny"))
    assert evicted > before
    assert router.metric("saccade_route_broken_total") == 0
    crashes = [stops(router, *each) for each in product(("demo", "tiny"), ("crashed", "failed"))]
    assert crashes == [0] * 4
    assert len(psutil.Process(router.process.pid).children()) == 1


def test_an_upload_is_found_by_every_model(router: Server, client: openai.OpenAI) -> None:
    file = client.files.create(file=("x.png", png()), purpose="vision")
    image: Any = {"type": "file", "file": {"file_id": file.id}}
    for model in ("demo", "tiny"):
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": [image]}], max_tokens=4
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 10


def test_a_server_that_is_killed_is_started_again(router: Server, client: openai.OpenAI) -> None:
    expected = ask(client, "demo", PROMPTS[0])
    before = stops(router, "demo", "crashed")
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": PROMPTS[0]}],
        max_tokens=8000,
        extra_body={"ignore_eos": True},
        stream=True,
    )
    next(iter(stream))
    server_of(router).kill()
    with pytest.raises(openai.APIError, match="the worker disconnected during the response"):
        list(stream)
    router.wait_for_metric("saccade_route_model_state", 1, model="demo", state="stopped")
    assert stops(router, "demo", "crashed") == before + 1
    assert ask(client, "demo", PROMPTS[0]) == expected


def test_an_idle_server_ends_and_the_last_one_dies_with_a_killed_router(
    start: Callable[..., Any],
) -> None:
    with pytest.raises(AssertionError, match="exit status"), start("1s") as router:
        client = client_of(router)
        expected = ask(client, "demo", PROMPTS[0])
        router.wait_for_metric("saccade_route_model_stops_total", 1, model="demo", reason="idle")
        assert not processes(router)
        assert ask(client, "demo", PROMPTS[0]) == expected
        assert router.metric("saccade_route_model_starts_total", model="demo") == 2
        servers = processes(router)
        router.process.send_signal(signal.SIGKILL)
        router.process.wait()
        deadline = time.monotonic() + 30
        while any(map(alive, servers)):
            assert time.monotonic() < deadline, "a server has outlived its router"
            time.sleep(0.05)
    assert len(servers) >= 3


def test_a_wrong_option_is_told_by_the_servers_last_words(
    tmp_path: Path,
) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[demo]\nmodel = "demo"\nargs = ["--context-length", "0"]')
    with running(tmp_path, "route", "--models", str(file)) as router:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=100)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
        assert "--context-length 0: must be at least 1" in answer.json()["error"]["message"]
