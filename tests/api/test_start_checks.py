"""While a server checks its first answers no client is answered; an unproven architecture is served
only where it is allowed, and says so.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from saccade.api.app import build_app
from saccade.api.serve import serve
from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.options import ServeOptions
from saccade.core.settings import AdapterSettings, CudaSettings, ParitySettings
from saccade.families.kit.base_spec import BaseSpec
from saccade.families.registry import load_spec
from saccade.front import assemble
from saccade.front.assemble import check_proven
from saccade.front.content import message_from_object
from saccade.front.conversation import Chat
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.request_manager import RequestManager
from saccade.plugins.any_model import parity_check
from saccade.plugins.any_model.parity_check import check_parity
from tests.helpers.echo import EchoEngine
from tests.helpers.served import FOLDER, TOKENIZER, build_front

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def with_front(work: Any, tmp_path: Path) -> Any:
    """Run `work`, given a front still to be started and a client of its app."""

    async def run() -> Any:
        front = build_front(
            EchoEngine(lambda _: TOKENIZER.encode("Hello!")), 8, str(tmp_path / "files")
        )
        app = httpx.ASGITransport(build_app(front, ("demo",), ServeOptions(), ()))
        try:
            async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:
                return await work(front, client)
        finally:
            await front.stop()

    return asyncio.run(run())


def test_an_adapter_has_another_name_than_the_model() -> None:
    options = ServeOptions(extras=(AdapterSettings(("tiny=/adapters/one",)),))
    message = r"--lora tiny=\.\.\.: 'tiny' is the name of the base model"
    with pytest.raises(ConfigError, match=message):
        serve("tiny", options)


async def test_attention_by_a_gpu_is_checked_by_the_engine() -> None:
    """The front end sees no device: FlashAttention-3 used to be refused on every GPU."""
    options = ServeOptions(extras=(CudaSettings("fa3"),))
    front = assemble.build_front(str(FOLDER), options)
    await front.stop()


def test_no_client_is_answered_while_first_answers_are_checked(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    async def work(front: RequestManager, client: httpx.AsyncClient) -> None:
        async def ask() -> tuple[int, int]:
            asked = await client.post("/v1/chat/completions", json=BODY)
            return (await client.get("/health")).status_code, asked.status_code

        async def check() -> None:
            seen.append(await ask())
            message = message_from_object({"role": "user", "content": "hello"}, "messages[0]")
            prepared = await front.prepare(GenerationRequest(Chat((message,)), {"max_tokens": 4}))
            async with aclosing(front.generate(prepared)) as events:
                assert [event async for event in events], "the check itself is answered"

        await front.start(check=check)
        seen.append(await ask())

    with_front(work, tmp_path)
    assert seen == [(503, 503), (200, 200)]


def test_a_check_that_fails_ends_the_start(tmp_path: Path) -> None:
    async def work(front: RequestManager, client: httpx.AsyncClient) -> int:
        async def check() -> None:
            raise CheckpointError("its answers are wrong")

        with pytest.raises(CheckpointError, match="its answers are wrong"):
            await front.start(check=check)
        told = await client.get("/health")
        assert "its answers are wrong" in told.text
        return told.status_code

    assert with_front(work, tmp_path) == 503


def test_a_chat_that_is_not_answered_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoReference:
        def __init__(self, *_: object) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(parity_check, "ReferenceChild", NoReference)
    options = ServeOptions(extras=(ParitySettings("generate"),))

    async def work(front: RequestManager, _: httpx.AsyncClient) -> None:
        engine: Any = front._engine
        engine.fault = ("TypeError: 'NoneType' object is not iterable", "internal_error")
        with pytest.raises(CheckpointError, match=r"'Say something\.' failed: TypeError"):
            await front.start(check=partial(check_parity, front, str(FOLDER), options))

    with_front(work, tmp_path)


def test_an_unproven_architecture_says_so_to_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listed(front: RequestManager, client: httpx.AsyncClient) -> Any:
        await front.start()
        return (await client.get("/v1/models")).json()["data"][0]

    assert "unproven" not in with_front(listed, tmp_path)
    monkeypatch.setattr(BaseSpec, "unproven", "SomeForCausalLM")
    assert with_front(listed, tmp_path)["unproven"] is True


def test_an_unproven_architecture_is_served_only_if_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec: Any = SimpleNamespace(unproven="SomeForCausalLM")
    with pytest.raises(
        ConfigError, match=r"SomeForCausalLM is not among .* start with --parity unp"
    ):
        check_proven(spec, Path("model"), ParitySettings())
    check_proven(spec, Path("model"), ParitySettings("unproven"))
    assert "SomeForCausalLM is unproven" in caplog.text


def test_a_family_of_our_own_is_proven() -> None:
    assert load_spec(FOLDER).unproven == ""
