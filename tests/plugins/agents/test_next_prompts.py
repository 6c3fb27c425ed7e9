"""The queue of next prompts: its bounds hold whoever asks, and nothing in it outlives its session's
next request. The engine's part is a script, so that it can be busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

import saccade.demo
from saccade.core.metrics import Metrics
from saccade.core.types import Request, SamplingParams
from saccade.families.registry import load_spec
from saccade.front.answer_update import AnswerUpdate
from saccade.front.prepared import PreparedRequest
from saccade.front.prompt_encoder import PromptEncoder
from saccade.ipc.messages import Ready
from saccade.media.content import Probe
from saccade.media.opened import CachedFrame, EncodedBytes
from saccade.plugins.agents import next_prompts
from saccade.plugins.agents.next_prompts import MAX_OF_CLIENT, MOST, NextPrompts
from saccade.plugins.agents.sessions import MAX_SESSIONS, Sessions, SessionTurn, Tenant
from saccade.text.answer.answer_format import SILENT
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from saccade_bench.agents.habits import HABITS
from tests.plugins.agents.test_sessions import Agent

FOLDER = Path(saccade.demo.__file__).parent / "model"
TOKENIZER = Tokenizer.load(FOLDER)
SPEC = load_spec(FOLDER)
ENCODER = PromptEncoder(
    SPEC, TOKENIZER, ChatTemplate.load(FOLDER, TOKENIZER, None, SPEC.templates), SILENT
)
RECIPE = SPEC.recipe(32, 32, SPEC.pixel_bounds)
ROOM = Ready(100_000, 10_000, ())


class Idle:
    """An engine that takes requests. busy: it never gets to them."""

    def __init__(self, busy: bool = True) -> None:
        self.sessions = Sessions()
        self.asked: list[Request] = []
        self.ended = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.metrics = Metrics()
        self.busy = busy
        self.queue = NextPrompts(
            self.sessions, ENCODER, SPEC, self._generate, self._spawn, self.metrics
        )

    async def _generate(self, prepared: PreparedRequest) -> AsyncGenerator[AnswerUpdate, None]:
        self.asked.append(prepared.request)
        try:
            if self.busy:
                await asyncio.Event().wait()
            yield AnswerUpdate(0, finish="length")
        finally:
            self.ended += 1

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    def answered(self, agent: Agent, ready: Ready = ROOM) -> SessionTurn:
        """Take the end of an agent's last answer."""
        assert agent.turn is not None
        salt = agent.tenant[0]
        last = Request("last", (1, 2, 3), (), (), SamplingParams(), salt, client=agent.tenant[1])
        self.queue.answered(agent.turn, PreparedRequest(last), ready)
        return agent.turn

    async def settle(self) -> None:
        """Let the queue go on until it waits for the engine, or is empty."""
        for _ in range(200):
            await asyncio.sleep(0.005)
            if not self.queue.waiting or (self.busy and len(self.asked) > self.ended):
                return

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def frame_of(nbytes: int) -> CachedFrame:
    """Return a still image's frame."""
    probe = Probe("PNG", 32, 32, "RGB", 1, 1)
    return CachedFrame(b"", EncodedBytes(bytes(nbytes), b""), probe, RECIPE)


def agent_of(idle: Idle, tenant: Tenant) -> Agent:
    """Return an agent whose rule is known, after a step."""
    agent = Agent(idle.sessions, HABITS["keep-1"], tenant)
    agent.run(4, computed=0)
    return agent


@pytest.mark.more
def test_a_thousand_sessions_share_a_bounded_queue() -> None:
    async def run() -> None:
        idle = Idle()
        agents = [agent_of(idle, (f"salt {i}", f"client {i}", "")) for i in range(1000)]
        for agent in agents:
            idle.answered(agent)
            assert idle.queue.waiting <= MOST
        await idle.settle()
        assert idle.queue.waiting <= MOST and len(idle.asked) == 1, "one at a time"
        assert len(idle.sessions) <= MAX_SESSIONS
        await idle.close()

    asyncio.run(run())


def test_a_client_with_many_sessions_leaves_room_for_others() -> None:
    async def run() -> None:
        idle = Idle()
        flood = [idle.answered(agent_of(idle, ("flood", "client", ""))) for _ in range(20)]
        await idle.settle()
        assert idle.queue.waiting <= MAX_OF_CLIENT + 1
        idle.answered(agent_of(idle, ("quiet", "client", "")))
        for turn in flood[:2]:
            idle.queue.stop(turn.session)
            await idle.settle()
        assert "quiet" in [each.cache_salt for each in idle.asked], "clients take turns"
        await idle.close()

    asyncio.run(run())


def test_images_that_wait_have_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        idle = Idle()
        for number in range(9):
            agent = Agent(idle.sessions, HABITS["keep-3"], (f"{number}", "client", ""))
            agent.run(5, computed=0)
            assert agent.turn is not None
            images = agent.turn.images
            for source, shown in images.items():
                images[source] = replace(shown, frames=(frame_of(100),))
            idle.answered(agent)
        assert idle.queue.waiting == 3, "two images each"
        await idle.close()

    monkeypatch.setattr(next_prompts, "MAX_BYTES", 600)

    asyncio.run(run())


@pytest.mark.parametrize("ready", [Ready(100_000, 64, ()), Ready(128, 10_000, ())])
def test_a_prompt_at_the_limit_is_not_computed(ready: Ready) -> None:
    """Of the context, or of what one prompt may take of the cache."""

    async def run() -> None:
        idle = Idle(busy=False)
        idle.answered(agent_of(idle, ("salt", "client", "")), ready)
        await idle.settle()
        assert not idle.asked and not idle.queue.waiting
        await idle.close()

    asyncio.run(run())


def test_what_is_computed_has_its_sessions_salt_and_client() -> None:
    async def run() -> None:
        idle = Idle(busy=False)
        agents = [agent_of(idle, (f"salt {i}", f"client {i}", "")) for i in range(3)]
        for agent in agents:
            idle.answered(agent)
        await idle.settle()
        found = [(each.cache_salt, each.client) for each in idle.asked]
        assert found == [(f"salt {i}", f"client {i}") for i in range(3)]
        assert all(each.caching.idle for each in idle.asked)
        await idle.close()

    asyncio.run(run())


def test_a_sessions_next_request_ends_what_is_computed_for_it() -> None:
    async def run() -> None:
        idle = Idle()
        agents = [agent_of(idle, (f"salt {i}", "client", "")) for i in range(3)]
        turns = [idle.answered(agent) for agent in agents]
        await idle.settle()
        assert (len(idle.asked), idle.ended, idle.queue.waiting) == (1, 0, 3)
        idle.queue.stop(turns[0].session)
        idle.queue.stop(turns[2].session)
        await idle.settle()
        assert [each.cache_salt for each in idle.asked] == ["salt 0", "salt 1"]
        assert (idle.ended, idle.queue.waiting) == (1, 1)
        await idle.close()

    asyncio.run(run())
