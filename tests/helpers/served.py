"""A server over real HTTP: uvicorn on a port of its own in a thread, around the demo model's intake
and a test double of the engine; and a router in front of it, in another thread. What clients see is
asked of both.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

import saccade.demo
from saccade.api.serve import Server
from saccade.core.arena import Arena
from saccade.core.metrics import Metrics
from saccade.core.options import (
    ConnectionOptions,
    ServeOptions,
    ServerOptions,
)
from saccade.core.types import Request
from saccade.families.registry import load_spec
from saccade.front.answer_defaults import load_answer_defaults
from saccade.front.input_processor import InputProcessor
from saccade.front.request_manager import RequestManager
from saccade.front.score_prompts import Scoring
from saccade.ipc.messages import Submit
from saccade.media.media import Media
from saccade.plugins import asked_plugins, plugins
from saccade.text.answer.answer_format import FORMATS, SILENT, AnswerFormat
from saccade.text.answer.reasoning import THINK
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from tests.helpers.echo import ARENA_BYTES, CONTEXT, EchoEngine
from tests.helpers.fork_servers import image_fork_servers
from tests.helpers.options import serve_options
from tests.text.templates import THINKING

if TYPE_CHECKING:
    from saccade.plugins.proxy.run import ProxyServer

FOLDER = Path(saccade.demo.__file__).parent / "model"
TOKENIZER = Tokenizer.load(FOLDER)


@dataclass
class Served:
    """A running server: its address, two clients of it, and what is behind it."""

    address: str
    http: httpx.Client
    openai: Any
    """An `openai.OpenAI`; tests send plain dicts, which its TypedDicts would refuse."""
    engine: EchoEngine
    front: RequestManager
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def submitted(self) -> list[Request]:
        """All requests that the engine has been sent."""
        return [each.request for each in self.engine.received if isinstance(each, Submit)]

    @property
    def prompt(self) -> str:
        """The newest request's prompt."""
        return TOKENIZER.decode(self.submitted[-1].tokens)

    def says(self, text: str) -> None:
        """From now on answer with this text."""
        ids = TOKENIZER.encode(text)
        self.engine.reply = lambda request: ids

    def on_loop(self, function: object, *args: object) -> None:
        self.loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]


def build_front(
    engine: EchoEngine,
    max_requests: int,
    files: str,
    template: ChatTemplate | None = None,
    answer_format: AnswerFormat = SILENT,
    model: str = "",
) -> RequestManager:
    spec, metrics = load_spec(FOLDER), Metrics()
    # A test deletes plugins, and their options with them.
    stored = {"files_dir": f"{files}:1MiB"} if any(p.name == "files" for p in plugins()) else {}
    media = Media(
        spec,
        serve_options(media_workers=1, max_image_bytes=500_000, **stored),
        Arena.create(ARENA_BYTES),
        metrics,
        fork_servers=image_fork_servers(),
        cards=[card for plugin in plugins() for card in plugin.requests.media],
    )
    intake = InputProcessor(
        spec,
        TOKENIZER,
        template or ChatTemplate.load(FOLDER, TOKENIZER, None, spec.templates),
        media,
        load_answer_defaults(FOLDER, spec),
        answer_format=answer_format,
        model=model,
        plugins=plugins(),
    )
    return RequestManager(intake, engine, metrics, max_requests, Scoring("last"))


@contextmanager
def serving(
    options: ServerOptions | None = None,
    edge: ConnectionOptions | None = None,
    template: ChatTemplate | None = None,
    answer_format: AnswerFormat = SILENT,
    context: int = CONTEXT,
    model: str = "",
    extras: tuple[object, ...] = (),
) -> Iterator[Served]:
    """A server whose engine says "Hello!" until its `reply` is changed. model: its name."""
    options = options or ServerOptions(port=0, served_model_name=("demo", "other"))
    ready = threading.Event()
    found: dict[str, Served] = {}

    async def run(files: str) -> None:
        engine = EchoEngine(lambda request: TOKENIZER.encode("Hello!"), context)
        most = options.max_queued_requests
        front = build_front(engine, most, files, template, answer_format, model)
        told = ServeOptions(
            server=options,
            edge=edge or ConnectionOptions(),
            extras=extras,
        )
        server = Server(front, options.served_model_name, told, asked_plugins(told))

        def on_ready(address: str, _: object) -> None:
            http = httpx.Client(base_url=address, timeout=30)
            key = options.api_key or "none"
            client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=30)
            found["served"] = Served(
                address, http, client, engine, front, server, asyncio.get_running_loop()
            )
            ready.set()

        await server.serve_until_shutdown(on_ready)

    def run_thread() -> None:
        with tempfile.TemporaryDirectory() as files:
            asyncio.run(run(files))

    image_fork_servers()  # here, not in the thread, which ends with the server
    thread = threading.Thread(target=run_thread)
    thread.start()
    try:
        assert ready.wait(30), "the server did not start"
        yield found["served"]
    finally:
        if served := found.get("served"):
            served.http.close()
            served.openai.close()
            served.server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def routed(
    served: Served, edge: ConnectionOptions | None = None, key: str = "none", **options: Any
) -> Iterator[Served]:
    """The same server, asked through a router."""
    from saccade.plugins.route.options import RouteOptions
    from saccade.plugins.route.run import RouteServer

    ready = threading.Event()
    found: list[str] = []
    told = RouteOptions(workers=(served.address,), port=0, **options)
    router = RouteServer(told, edge or ConnectionOptions())

    def on_ready(address: str) -> None:
        found.append(address)
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(router.serve_until_shutdown(on_ready)))
    thread.start()
    try:
        assert ready.wait(30), "the router did not start"
        (address,) = found
        with (
            httpx.Client(base_url=address, timeout=30) as http,
            openai.OpenAI(
                base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=30
            ) as client,
        ):
            yield replace(served, address=address, http=http, openai=client)
    finally:
        router.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the router did not end"


@contextmanager
def proxied(upstream: str, **options: Any) -> Iterator[tuple[str, ProxyServer]]:
    """A proxy's address, and the proxy."""
    from saccade.plugins.proxy.options import ProxyOptions
    from saccade.plugins.proxy.run import ProxyServer

    ready = threading.Event()
    found: list[str] = []
    proxy = ProxyServer(ProxyOptions(upstream=upstream, port=0, **options), ConnectionOptions())

    def on_ready(address: str) -> None:
        found.append(address)
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(proxy.serve_until_shutdown(on_ready)))
    thread.start()
    try:
        assert ready.wait(30), "the proxy did not start"
        yield found[0], proxy
    finally:
        proxy.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(scope="session")
def caller() -> Iterator[Served]:
    """A model that calls tools as Hermes does, for all modules that ask about calls."""
    with serving(answer_format=AnswerFormat(FORMATS["hermes"]), context=8192) as served:
        yield served


@pytest.fixture(scope="session")
def thinker() -> Iterator[Served]:
    """One that reasons before it answers, and calls in XML."""
    template = ChatTemplate({"default": THINKING}, TOKENIZER.named_tokens)
    with serving(
        answer_format=AnswerFormat(FORMATS["xml"], THINK), context=8192, template=template
    ) as served:
        yield served


@pytest.fixture(scope="module")
def module_router(module_server: Served) -> Iterator[Served]:
    with routed(module_server) as served:
        yield served


@pytest.fixture(params=["direct", pytest.param("routed", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest) -> str:
    """How a server is asked. Of `test_routed.py`, a table of both is in the default run."""
    return str(request.param)


its_own = pytest.mark.parametrize("way", ["direct"], indirect=True)
"""What a server says of itself, and the bodies that it waits for: a router has its own of both."""


@pytest.fixture
def served(module_server: Served, way: str, request: pytest.FixtureRequest) -> Served:
    """One server for all tests of a module, and a router; its engine as at the start."""
    module_server.engine.reply = lambda request: TOKENIZER.encode("Hello!")
    module_server.engine.fault = None
    module_server.engine.caching = None
    module_server.engine.restored = ()
    module_server.engine.received.clear()
    if way == "direct":
        return module_server
    found: Served = request.getfixturevalue("module_router")
    return found


@pytest.fixture
def claude(served: Served) -> Iterator[Any]:
    """Anthropic's SDK. Tests send plain dicts, which its TypedDicts would refuse."""
    import anthropic

    with anthropic.Anthropic(
        api_key="any", base_url=served.address, max_retries=0, timeout=30
    ) as client:
        yield client
