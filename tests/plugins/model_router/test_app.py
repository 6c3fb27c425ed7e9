"""Whose server gets a request: asked over HTTP, of servers in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.core.metrics import ROUTED, Metrics
from saccade.edge.body import Bodies
from saccade.plugins.model_router.app import ModelRouter
from saccade.plugins.route.options import RouteOptions
from saccade.plugins.route.run import RouterContext, build_upstreams
from tests.plugins.model_router.fakes import INSTANCE, World, faked

CHAT = "/v1/chat/completions"
MODELS = """
memory = "2MiB"
stay = "0s"
[a]
model = "first"
aliases = ["gpt-4o"]
[b]
model = "second"
args = ["--lora", "poet=/adapters/poet"]
[c]
model = "third"
"""


@asynccontextmanager
async def routed(
    folder: Path, text: str = MODELS, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, World]]:
    """A client of a router, with room for two of three models."""
    file = folder / "models.toml"
    file.write_text(text)
    metrics = Metrics(ROUTED)
    settings = RouteOptions(models=str(file), **options)
    with faked() as world:
        router = build_upstreams(RouterContext(settings, metrics, Bodies(1 << 20, metrics)))
        assert isinstance(router, ModelRouter)
        await router.start()
        running = asyncio.create_task(router.watch())
        transport = httpx.ASGITransport(router.app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                yield client, world
        finally:
            router.begin_stop()
            running.cancel()
            await router.stop()


async def test_a_request_gets_the_model_that_it_names(tmp_path: Path) -> None:
    async with routed(tmp_path) as (client, world):
        for name, model in [("a", "first"), ("gpt-4o", "first"), ("poet", "second"), ("", "first")]:
            answer = await client.post(CHAT, json={"model": name, "messages": []})
            assert (answer.json()["model"], answer.json()["path"]) == (model, CHAT)
            assert json.loads(answer.json()["body"])["model"] == name, "the body passes unchanged"
        assert (await client.post(CHAT, json={"messages": []})).json()["model"] == "first"
        assert world.started == {"first": 1, "second": 1}
        assert world.options["first"][-4:] == [
            *("--served-model-name", "a"),
            *("--served-model-name", "gpt-4o"),
        ]


@pytest.mark.parametrize(("path", "nested"), [(CHAT, True), ("/v1/messages", True)])
async def test_an_unknown_model_is_404_with_the_list(
    path: str, nested: bool, tmp_path: Path
) -> None:
    async with routed(tmp_path) as (client, world):
        answer = await client.post(path, json={"model": "gpt-5"})
        assert answer.status_code == 404
        assert "'gpt-5' does not exist; this router has 'a', 'b', 'c'" in answer.text
        assert "model_not_found" in answer.text
        assert not world.started


async def test_models_are_listed_with_their_states(tmp_path: Path) -> None:
    async with routed(tmp_path) as (client, world):
        await client.post(CHAT, json={"model": "b"})
        world.failing.add("third")
        failed = await client.post(CHAT, json={"model": "c"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_failed")
        assert failed.headers["retry-after"] == "1"
        listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert [each["state"] for each in listed.values()] == ["stopped", "ready", "failed"]
        assert listed["a"]["aliases"] == ["gpt-4o"]
        assert listed["c"]["reason"] == "error: the checkpoint is damaged"
        assert (await client.get("/v1/models/gpt-4o")).json() == listed["a"]
        assert (await client.get("/v1/models/x")).status_code == 404
        health = (await client.get("/health")).json()
        assert health["status"] == "ready"
        assert [each["state"] for each in health["models"]] == ["stopped", "ready", "failed"]
        figures = (await client.get("/metrics")).text
        assert 'saccade_route_model_state{model="b",state="ready"} 1.0' in figures
        assert 'saccade_route_model_stops_total{model="c",reason="failed"} 1.0' in figures


async def test_requests_without_a_model_go_to_a_server_that_runs(tmp_path: Path) -> None:
    async with routed(tmp_path) as (client, world):
        await client.post(CHAT, json={"model": "b"})
        upload = {"file": ("x.png", b"x")}
        for answer in [
            await client.get("/v1/files"),
            await client.post("/v1/files", files=upload, data={"purpose": "vision"}),
            await client.delete("/v1/files/file-1"),
            await client.get("/"),
        ]:
            assert answer.json()["model"] == "second"
        assert world.started == {"second": 1}
        named = await client.post("/flush_cache", headers={"x-saccade-model": "a"})
        assert named.json()["model"] == "first"
        unknown = await client.get("/v1/files", headers={"x-saccade-model": "x"})
        assert unknown.status_code == 404


async def test_what_continues_a_response_goes_where_it_is_kept(tmp_path: Path) -> None:
    async with routed(tmp_path) as (client, _world):
        await client.post(CHAT, json={"model": "c"})
        before = f"resp_{INSTANCE}{'1' * 40}"
        kept = await client.post("/v1/responses", json={"previous_response_id": before})
        assert kept.json()["model"] == "third"
        assert (await client.get(f"/v1/responses/{before}")).json()["model"] == "third"
        lost = await client.post("/v1/responses", json={"previous_response_id": "resp_1"})
        assert lost.json()["model"] == "first", "which says that there is none"
        named = {"previous_response_id": before, "model": "a"}
        assert (await client.post("/v1/responses", json=named)).json()["model"] == "first"


async def test_batches_are_refused_in_a_sentence(tmp_path: Path) -> None:
    async with routed(tmp_path) as (client, world):
        answer = await client.post("/v1/batches", json={"input_file_id": "file-1"})
        assert answer.status_code == 400
        assert "saccade serve MODEL" in answer.json()["error"]["message"]
        assert not world.started


@pytest.mark.parametrize("body", [b"nonsense", b"[]", b'{"model": 3}', b'{"model": ["b"]}', b"--x"])
async def test_nonsense_goes_to_the_first_model(body: bytes, tmp_path: Path) -> None:
    async with routed(tmp_path) as (client, _):
        answer = await client.post(CHAT, content=body)
        assert answer.json()["model"] == "first", "which says what is wrong"


async def test_nobody_without_a_key_starts_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SACCADE_API_KEY", "open sesame")
    async with routed(tmp_path) as (client, world):
        for answer in [
            await client.post(CHAT, json={"model": "a"}),
            await client.post(CHAT, json={"model": "a"}, headers={"x-api-key": "wrong"}),
            await client.get("/v1/models"),
        ]:
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert not world.started
        assert (await client.get("/health")).is_success
        client.headers["authorization"] = "Bearer open sesame"
        assert (await client.post(CHAT, json={"model": "a"})).is_success
        assert world.environment == {"SACCADE_API_KEY": "open sesame"}
        assert not any("sesame" in word for word in world.options["first"])


async def test_keys_of_a_file_are_the_servers_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:one\nbob:two\n")
    async with routed(tmp_path, f'api-keys-file = "{keys}"\n{MODELS}') as (client, world):
        assert (await client.post(CHAT, json={})).status_code == 401
        answer = await client.post(CHAT, json={}, headers={"authorization": "Bearer two"})
        assert answer.is_success
        assert ("--api-keys-file", str(keys)) in zip(
            world.options["first"], world.options["first"][1:], strict=False
        )


async def test_pages_ask_before_they_send_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SACCADE_API_KEY", "open sesame")
    origin = "https://app.example"
    async with routed(tmp_path, cors_origins=(origin,)) as (client, world):
        asking = {"origin": origin, "access-control-request-method": "POST"}
        answer = await client.options(CHAT, headers=asking)
        assert answer.is_success
        assert answer.headers["access-control-allow-origin"] == origin
        assert not world.started
