"""Routes of plugins: found by folder or entry point, and imported at the first request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from saccade.api import mounting
from saccade.api.app import build_app
from saccade.api.mounting import ApiContext, MountedPlugin, Resumption
from saccade.core.options import ServeOptions, ServerOptions
from saccade.front.request_manager import RequestManager
from saccade.plugin import Http, Plugin
from saccade.plugins import asked_plugins, plugins
from saccade.plugins.batches.runner import BatchRunner
from saccade.plugins.encoder.options import RoleOptions
from saccade.plugins.page.handlers import FILES
from saccade.plugins.page.options import PageOptions
from tests.helpers.distribution import install_plugin
from tests.helpers.echo import EchoEngine
from tests.helpers.served import TOKENIZER, build_front

Work = Callable[[Starlette, httpx.AsyncClient], Awaitable[Any]]
SCRIPT = next(path for path in FILES if path.endswith(".js"))
MOUNTED = [plugin for plugin in plugins() if plugin.http.routes]


def with_app(folder: Path, work: Work, options: ServeOptions | None = None) -> Any:
    """Run `work` with an app in front of a scripted engine, and a client of it."""

    async def run() -> Any:
        engine = EchoEngine(lambda _: TOKENIZER.encode("Hello!"))
        front: RequestManager = build_front(engine, 8, str(folder / "files"))
        chosen = options or ServeOptions()
        app = build_app(front, ("demo",), chosen, asked_plugins(chosen))
        transport = httpx.ASGITransport(app)
        try:
            await front.start()
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await work(app, http)
        finally:
            await app.state.services.stop()
            await front.stop()

    return asyncio.run(run())


def mounted(app: Starlette) -> dict[str, MountedPlugin]:
    return {each.plugin.name: each for each in app.state.plugins}


def is_loaded(plugin: MountedPlugin) -> bool:
    return plugin._loading is not None


def test_each_plugin_answers_the_paths_that_it_states(tmp_path: Path) -> None:
    async def work(app: Starlette, _: httpx.AsyncClient) -> None:
        context = mounted(app)["messages"]._api
        for plugin in MOUNTED:
            build: Callable[[ApiContext], list[Route]] = resolve_name(plugin.http.routes or "")
            paths = {route.path for route in build(context)}
            folders = [
                path.partition("{path:path}")[0] for path in plugin.http.paths if ":path" in path
            ]
            rest = {path for path in paths if not any(map(path.startswith, folders))}
            assert rest == {path for path in plugin.http.paths if ":path" not in path}, plugin.name

    with_app(tmp_path, work)


def test_only_the_plugin_of_a_request_is_loaded(tmp_path: Path) -> None:
    async def work(app: Starlette, http: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await http.get("/health")).status_code == 200
        assert not any(map(is_loaded, app.state.plugins))
        assert (await http.post("/v1/messages", json={**body, "model": "demo"})).status_code == 200
        names = [each.plugin.name for each in app.state.plugins if is_loaded(each)]
        assert names == ["messages"]

    with_app(tmp_path, work)


PROGRAM = """
import sys
import saccade.api.serve
from saccade.plugins import asked_plugins, plugins
for plugin in plugins():
    module = (plugin.http.routes or "").partition(":")[0]
    assert module not in sys.modules, module
assert "saccade.plugins.responses.store" not in sys.modules
assert "saccade.plugins.batches.runner" not in sys.modules
asked_plugins(saccade.core.options.ServeOptions())
modules = [name for name in sys.modules if name.startswith("saccade.plugins.")]
assert not [name for name in modules if name.endswith(".options")]
"""


def test_a_server_imports_no_plugin_before_a_request_for_it() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_plugins_are_enabled_by_default_as_their_own_functions_say() -> None:
    default = ServeOptions()
    for plugin in plugins():
        if plugin.asked is not None:
            own = resolve_name(plugin.asked)(default)
            assert (plugin in asked_plugins(default)) == own, plugin.name


def test_a_plugin_is_built_once_however_many_requests_come_first(tmp_path: Path) -> None:
    async def work(_: Starlette, http: httpx.AsyncClient) -> list[int]:
        answers = [http.get("/v1/batches"), *(http.get("/v1/batches/x") for _ in range(7))]
        return [answer.status_code for answer in await asyncio.gather(*answers)]

    async def counted(app: Starlette, http: httpx.AsyncClient) -> tuple[list[int], int]:
        statuses = await work(app, http)
        services = app.state.services._services
        return statuses, sum(isinstance(each, BatchRunner) for each in services)

    statuses, runners = with_app(tmp_path, counted)
    assert statuses == [200] + [404] * 7
    assert runners == 1


def test_batches_of_an_earlier_run_load_their_plugin(tmp_path: Path) -> None:
    async def work(app: Starlette, http: httpx.AsyncClient) -> list[bool]:
        batches, loaded = mounted(app)["batches"], []
        for _ in range(2):
            await batches.resume()
            loaded.append(is_loaded(batches))
            (tmp_path / "files" / "batches").mkdir(parents=True, exist_ok=True)
        return loaded

    assert with_app(tmp_path, work) == [False, True]


def test_a_plugin_is_resumed_though_a_look_at_another_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounting, "RESUME_SECONDS", 0.01)

    async def work(app: Starlette, _: httpx.AsyncClient) -> list[bool]:
        batches = mounted(app)["batches"]
        routes = batches.plugin.http.routes
        broken = Plugin("broken", http=Http(routes=routes, waiting="saccade.none:waiting"))
        service = Resumption([MountedPlugin(broken, batches._api), batches])
        service.start()
        await asyncio.sleep(0.1)
        loaded = [is_loaded(batches)]
        (tmp_path / "files" / "batches").mkdir(parents=True, exist_ok=True)
        while not is_loaded(batches):
            await asyncio.sleep(0.01)
        await service.stop()
        return [*loaded, is_loaded(batches)]

    assert with_app(tmp_path, work) == [False, True]


def test_a_method_that_a_plugin_lacks_is_405_in_its_own_words(tmp_path: Path) -> None:
    async def work(_: Starlette, http: httpx.AsyncClient) -> list[httpx.Response]:
        return [await http.get("/v1/messages"), await http.delete("/v1/embeddings")]

    anthropic, openai = with_app(tmp_path, work)
    assert anthropic.status_code == openai.status_code == 405
    assert anthropic.json()["type"] == "error"
    assert openai.json()["error"]["code"] == "method_not_allowed"
    assert anthropic.headers["allow"] == openai.headers["allow"] == "POST"


def test_options_decide_what_is_mounted(tmp_path: Path) -> None:
    async def names(app: Starlette, _: httpx.AsyncClient) -> set[str]:
        return set(mounted(app))

    every = {plugin.name for plugin in MOUNTED}
    assert with_app(tmp_path, names) == every - {"encoder"}
    no_page = ServeOptions(extras=(PageOptions(disable_page=True),))
    assert with_app(tmp_path, names, no_page) == every - {"encoder", "page"}
    assert with_app(tmp_path, names, ServeOptions(extras=(RoleOptions(role="encode"),))) == {
        "encoder"
    }


def test_the_page_needs_no_key_and_everything_else_does(tmp_path: Path) -> None:
    async def work(_: Starlette, http: httpx.AsyncClient) -> dict[str, int]:
        paths = (
            "/",
            SCRIPT,
            "/page/none.js",
            "/page",
            "/pages/x",
            "/saccade/state",
            "/v1/models",
            "/docs",
        )
        return {path: (await http.get(path)).status_code for path in paths}

    keyed = ServeOptions(server=ServerOptions(api_key="secret"))
    statuses = with_app(tmp_path, work, keyed)
    assert statuses.pop("/") == 200 and statuses.pop(SCRIPT) == 200
    assert statuses.pop("/page/none.js") == 404
    assert set(statuses.values()) == {401}


FOREIGN = """
from msgspec import Struct
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from saccade.api.description import ApiOperation, Description
from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "greeting",
    http=Http(routes="greeting:routes", paths=("/greet",), operations="greeting:OPERATIONS"),
)

class Greeting(Struct):
    greeted: str
    model: str

OPERATIONS = Description(
    (ApiOperation("get", "/greet", "Greet the client", answer="Greeting"),), types=(Greeting,)
)

def routes(api):
    async def greet(request):
        return PlainTextResponse(f"{api.handler.names[0]} greets")
    return [Route("/greet", greet)]
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution with a plugin."""
    site = tmp_path / "site"
    install_plugin(site, "greeting")
    (site / "greeting.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(site)
    plugins.cache_clear()
    yield
    plugins.cache_clear()


@pytest.mark.usefixtures("foreign")
def test_another_distribution_adds_a_route(tmp_path: Path) -> None:
    async def work(_: Starlette, http: httpx.AsyncClient) -> tuple[str, Any]:
        document = (await http.get("/openapi.json")).json()
        return (await http.get("/greet")).text, document

    greeting, document = with_app(tmp_path, work)
    assert greeting == "demo greets"
    assert document["paths"]["/greet"]["get"]["summary"] == "Greet the client"
    fields = document["components"]["schemas"]["Greeting"]["properties"]
    assert fields["greeted"] == {"type": "string"}
    assert fields["model"]["description"] == "One of the names that GET /v1/models lists."


def test_a_plugin_that_fails_to_load_fails_its_requests_alone(tmp_path: Path) -> None:
    async def work(app: Starlette, http: httpx.AsyncClient) -> list[int]:
        context = mounted(app)["messages"]._api
        plugin = Plugin("broken", http=Http(routes="saccade.none:routes", paths=("/broken",)))
        broken = MountedPlugin(plugin, context)
        app.router.routes.extend(broken.routes)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            failed = [(await client.get("/broken")).status_code for _ in range(2)]
        return [*failed, (await http.get("/v1/models")).status_code]

    assert with_app(tmp_path, work) == [500, 500, 200]
