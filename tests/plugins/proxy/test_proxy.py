"""`saccade proxy` before a server, and before one that knows nothing of it: clients see what they
would see without it. The transports for httpx too.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from saccade import AsyncSendOnce, SendOnce
from saccade.core.errors import ConfigError
from saccade.core.options import ServerOptions
from saccade.edge.body import LARGE_BODY, MAX_ON_LOOP
from saccade.plugins.proxy.app import ServerAddress
from saccade.tools import send_once
from tests.helpers.images import data_url, png
from tests.helpers.served import Served, proxied, serving

CHAT = "/v1/chat/completions"
NAMED = "saccade_referenced_bytes_total"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(ServerOptions(port=0, served_model_name=("demo",))) as served:
        yield served


@pytest.fixture(scope="module")
def proxy(server: Served) -> Iterator[Served]:
    """The server as clients see it through a proxy."""
    with (
        proxied(f"{server.address}/v1") as (address, _),
        httpx.Client(base_url=address, timeout=30) as http,
        openai.OpenAI(
            base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=30
        ) as client,
    ):
        yield replace(server, address=address, http=http, openai=client)


def image(size: int) -> str:
    """An image's URL, too long to stay."""
    return data_url(png("red", (size, 64)) + bytes(2000))


def user(*urls: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": each}} for each in urls
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}


class Counting:
    """Bytes that the server did not have to read again."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._before = self._now()

    @property
    def named(self) -> float:
        return self._now() - self._before

    def _now(self) -> float:
        return self._server.front.metrics.value(NAMED)


# ---- before a server


def test_both_apis_and_streams_pass(proxy: Served) -> None:
    counting = Counting(proxy)
    messages = [user(image(64))]
    for stream in (False, True):
        answer = proxy.openai.chat.completions.create(
            model="demo", messages=messages, stream=stream
        )
        if stream:
            answer = "".join(each.choices[0].delta.content or "" for each in answer if each.choices)
        else:
            answer = answer.choices[0].message.content
        assert answer == "Hello!"
    given = [{"type": "input_image", "image_url": image(64), "detail": "auto"}]
    response = proxy.openai.responses.create(
        model="demo", input=[{"role": "user", "content": given}]
    )
    assert response.output_text == "Hello!"
    client = anthropic.Anthropic(base_url=proxy.address, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": image(64).partition(",")[2]}
    shown: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with client.messages.stream(model="demo", max_tokens=9, messages=shown) as events:
        assert events.get_final_text() == "Hello!"
    nbytes = len(png("red", (64, 64))) + 2000
    assert counting.named == 3 * nbytes, "one of the four carried it"


def test_a_kept_response_goes_on_when_its_bytes_are_forgotten(proxy: Served) -> None:
    given = [{"type": "input_image", "image_url": image(65), "detail": "auto"}]
    first = proxy.openai.responses.create(model="demo", input=[{"role": "user", "content": given}])
    held = proxy.http.get(f"/v1/responses/{first.id}/input_items").json()
    assert held["data"][0]["content"][0]["image_url"] == image(65), "kept as the client sent it"
    second = proxy.openai.responses.create(
        model="demo", previous_response_id=first.id, input="and now?"
    )
    assert second.output_text == "Hello!"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [user(data_url(b"no image" * 500))]}),
        (CHAT, {"messages": [user(image(64))], "temperature": 99}),
        (CHAT, {"messages": [user(image(64))], "no_such_field": 1}),
        (CHAT, {"messages": [user(*[image(64)] * 300)]}),
        ("/v1/messages", {"messages": [user(image(64))], "model": "demo"}),
        ("/v1/nothing", {"messages": [user(image(64))]}),
        ("/v1/files", {"messages": [user(image(64))]}),
    ],
)
def test_refusals_are_the_servers(
    server: Served, proxy: Served, path: str, body: dict[str, Any]
) -> None:
    headers = {"x-request-id": "test"}
    for _ in range(2):  # with its bytes, and by name
        direct, by_proxy = (
            each.http.post(path, json=body, headers=headers) for each in (server, proxy)
        )
        assert by_proxy.status_code == direct.status_code
        assert by_proxy.content == direct.content


@pytest.mark.parametrize("body", [b"", b"{", b"\xff" * 3000, b'"' * 3000, b"[" * 100_000])
def test_what_is_no_json_is_the_servers_to_refuse(
    server: Served, proxy: Served, body: bytes
) -> None:
    headers = {"content-type": "application/json", "x-request-id": "test"}
    direct, by_proxy = (
        each.http.post(CHAT, content=body, headers=headers) for each in (server, proxy)
    )
    assert (by_proxy.status_code, by_proxy.content) == (direct.status_code, direct.content)


def test_uploads_and_questions_pass(server: Served, proxy: Served) -> None:
    uploaded = proxy.openai.files.create(file=("a.png", png()), purpose="vision")
    assert proxy.openai.files.content(uploaded.id).read() == png()
    proxy.openai.files.delete(uploaded.id)
    for path in ("/health", "/v1/models", "/metrics?x=1"):
        assert proxy.http.get(path).status_code == server.http.get(path).status_code == 200
    assert proxy.http.head("/health").status_code == server.http.head("/health").status_code


def test_a_web_page_may_not_use_it(proxy: Served) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        assert proxy.http.get("/v1/models", headers=headers).status_code == 403


def test_a_large_body_holds_no_other(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate, scan = threading.Event(), threading.Event(), send_once._named

    def wait_and_scan(body: bytes) -> Iterator[tuple[int, int, str]]:
        if len(body) > LARGE_BODY:
            begun.set()
            assert gate.wait(30)
        return scan(body)

    monkeypatch.setattr(send_once, "_named", wait_and_scan)
    picture = {"messages": [user(data_url(png("red", (72, 64)) + bytes(2 * MAX_ON_LOOP)))]}
    with proxied(server.address) as (address, _):
        headers = {"content-type": "application/json"}
        content = {"content": b'"' * (LARGE_BODY + 1), "headers": headers, "timeout": 30}
        large = threading.Thread(target=httpx.post, args=(address + CHAT,), kwargs=content)
        large.start()
        try:
            assert begun.wait(30)
            assert httpx.post(address + CHAT, json=picture).is_success
            assert large.is_alive()
        finally:
            gate.set()
            large.join(30)


def test_bodies_have_a_bound(server: Served) -> None:
    with proxied(server.address, max_body_mb=1) as (address, _):
        large = {"messages": [user(data_url(bytes(2_000_000)))]}
        answer = httpx.post(address + CHAT, json=large)
        assert answer.status_code == 413


def test_a_server_that_is_away_is_told_in_each_api() -> None:
    with proxied("http://127.0.0.1:9") as (address, _):
        chat = httpx.post(address + CHAT, json={"messages": [user(image(64))]})
        assert chat.status_code == 502
        assert chat.json()["error"]["code"] == "upstream_lost"
        message = httpx.post(f"{address}/v1/messages", json={})
        assert message.json()["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "https://user:secret@host", "http://h:x", "http://h/v1?a=b"]
)
def test_an_upstream_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerAddress.read(url)
    assert "--upstream" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000, "", False)),
        ("http://[::1]:8000/v1/", ("::1", 8000, "", False)),
        ("https://host/api/v1", ("host", 443, "/api", True)),
        ("https://host:8443/a/b", ("host", 8443, "/a/b", True)),
    ],
)
def test_an_upstream_is_read(url: str, told: tuple[str, int, str, bool]) -> None:
    found = ServerAddress.read(url)
    assert (found.host, found.port, found.prefix, found.secure) == told


# ---- before another server


class Other(BaseHTTPRequestHandler):
    """A server that knows chats and nothing else. asked: (path, type, body) of each request."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str | None, bytes]]

    def do_GET(self) -> None:
        self._answer(404, b"no such page")

    def do_POST(self) -> None:
        self._answer(200, b'{"choices": []}')

    def _answer(self, status: int, told: bytes) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append((self.path, self.headers["content-type"], body))
        self.send_response(status)
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def other() -> Iterator[tuple[str, list[tuple[str, str | None, bytes]]]]:
    asked: list[tuple[str, str | None, bytes]] = []
    handler = type("Handler", (Other,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}/base", asked
        served.shutdown()
        thread.join()


def test_another_server_is_asked_once_and_gets_bodies_as_they_are(
    other: tuple[str, list[tuple[str, str | None, bytes]]],
) -> None:
    url, asked = other
    body = json.dumps({"messages": [user(image(64))], "seed": 1.0}, indent=3).encode()
    with proxied(f"{url}/v1") as (address, _):
        for _ in range(3):
            headers = {"content-type": "application/json; charset=utf-8"}
            assert httpx.post(f"{address}{CHAT}?a=b", content=body, headers=headers).is_success
    sent = (f"/base{CHAT}?a=b", "application/json; charset=utf-8", body)
    assert asked == [("/base/version", None, b""), sent, sent, sent]


# ---- transports

CLIENT_NEEDS = {"blake3", "msgspec", "pybase64", "httpx", "httpcore"}
"""Libraries that a sending client may import. All others that the server needs are blocked."""
ALONE = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is not installed")

url, blocked, body = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
sys.meta_path.insert(0, Blocked())
import httpx
from saccade import SendOnce

transport = SendOnce(httpx.HTTPTransport())
with httpx.Client(transport=transport, timeout=30) as client:
    for _ in range(3):
        answer = client.post(url, json=body)
        print(answer.json()["choices"][0]["message"]["content"])
print(transport.savings.sent, transport.savings.named)
"""


def server_libraries() -> set[str]:
    """The modules that Saccade's dependencies and extras install, as far as they are here."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["cpu"], "transformers"]
    names = {re.match(r"[\w-]+", each)[0].replace("_", "-").lower() for each in needs}  # type: ignore[index]
    return {
        module
        for module, owners in packages_distributions().items()
        if names & {owner.replace("_", "-").lower() for owner in owners}
    }


def test_a_client_sends_bytes_once_without_the_server_s_libraries(server: Served) -> None:
    blocked = server_libraries() - CLIENT_NEEDS
    assert {"torch", "numba", "starlette", "uvicorn", "numpy", "transformers"} <= blocked
    counting = Counting(server)
    body = json.dumps({"model": "demo", "messages": [user(image(72))]})
    arguments = f"{server.address}{CHAT}", json.dumps(sorted(blocked)), body
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.splitlines() == ["Hello!"] * 3 + ["1 2"]
    assert counting.named == 2 * (len(png("red", (72, 64))) + 2000)


LIBRARIES = pytest.mark.parametrize("library", [httpx, httpx2], ids=lambda each: each.__name__)


@LIBRARIES
def test_a_transport_sends_bytes_once(server: Served, library: Any) -> None:
    counting, transport = Counting(server), SendOnce(library.HTTPTransport())
    with openai.OpenAI(
        base_url=f"{server.address}/v1",
        api_key="none",
        max_retries=0,
        http_client=library.Client(transport=transport),
    ) as client:
        chats: Any = client.chat.completions
        for stream in (False, True, False):
            answer = chats.create(model="demo", messages=[user(image(70))], stream=stream)
            assert "Hello" in "".join(str(each) for each in answer)
    assert (transport.savings.sent, transport.savings.named) == (1, 2)
    assert counting.named == 2 * (len(png("red", (70, 64))) + 2000)


@LIBRARIES
def test_a_transport_for_asyncio_sends_bytes_once(server: Served, library: Any) -> None:
    counting, transport = Counting(server), AsyncSendOnce(library.AsyncHTTPTransport())

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.address}/v1",
            api_key="none",
            max_retries=0,
            http_client=library.AsyncClient(transport=transport),
        ) as client:
            await client.models.list()
            chats: Any = client.chat.completions
            answers = [
                await chats.create(model="demo", messages=[user(image(71))]) for _ in range(3)
            ]
        return [each.choices[0].message.content for each in answers]

    assert asyncio.run(ask()) == ["Hello!"] * 3
    assert counting.named == 2 * (len(png("red", (71, 64))) + 2000)


@pytest.mark.parametrize("once", [True, False], ids=["transport", "plain"])
def test_a_transport_raises_what_the_client_would_see(server: Served, once: bool) -> None:
    transport: Any = httpx2.HTTPTransport()
    client = httpx2.Client(transport=SendOnce(transport) if once else transport)  # type: ignore[arg-type]
    data = data_url(b"no image" * 500).partition(",")[2]
    bad: Any = {"data": data, "type": "base64", "media_type": "image/png"}
    with anthropic.Anthropic(
        base_url=server.address, api_key="none", max_retries=0, http_client=client
    ) as sdk:
        messages: Any = [{"role": "user", "content": [{"type": "image", "source": bad}]}]
        for _ in range(2):
            with pytest.raises(anthropic.BadRequestError, match="invalid_image"):
                sdk.messages.create(model="demo", max_tokens=9, messages=messages)


def test_an_answer_that_is_read_ahead_is_whole(server: Served) -> None:
    with httpx.Client(transport=SendOnce(httpx.HTTPTransport()), base_url=server.address) as client:  # type: ignore[arg-type]
        body = {"messages": [user(data_url(b"no image" * 500))]}
        with client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 400
            assert "invalid_image" in "".join(answer.iter_text())
