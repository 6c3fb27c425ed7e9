"""What is learned of how a client trims, from requests alone, and what is never learned."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from blake3 import blake3

from saccade.core.types import Image, ImageKey
from saccade.front.answer_update import AnswerUpdate, CachedTokens
from saccade.front.content import message_from_object
from saccade.front.conversation import Chat, MessageText
from saccade.front.prompt_encoder import GenerationRequest
from saccade.media.opened import OpenedImage, ReadTimes
from saccade.media.sources.fairness import Requester
from saccade.plugins.agents.history_edits import AskedEdit, ClearToolUses
from saccade.plugins.agents.sessions import (
    MAX_SESSIONS,
    Sessions,
    SessionTurn,
    Tenant,
)
from saccade.plugins.agents.trust import MAX_WRONG
from saccade.text.answer.events import CallArguments, CallStarted, Text
from saccade_bench.agents.habits import HABITS, Habit

SYSTEM = {"role": "system", "content": "You operate a computer."}
US: Tenant = ("salt", "client", "")


def opened(url: str) -> OpenedImage:
    key = ImageKey(blake3(url.encode()).digest(), b"settings", "salt")
    image = Image(key, (1, 4, 4), 4, 16, (8, 8))
    return OpenedImage("still", image, (), Requester("us"), ReadTimes(0.0, 0.0, 0.0))


def ask(sessions: Sessions, messages: list[Any], tenant: Tenant = US) -> SessionTurn | None:
    """Follow a request as the front end does: only chats that go on."""
    chat = Chat(tuple(message_from_object(m, f"messages[{i}]") for i, m in enumerate(messages)))
    if not chat.goes_on:
        return None
    urls = [source.url for source in chat.sources if isinstance(source.url, str)]
    return sessions.follow(tenant, GenerationRequest(chat), [*map(opened, urls)])


class Agent:
    """An agent with a habit. Each step is a request and its answer."""

    _numbers = count()

    def __init__(
        self, sessions: Sessions, habit: Habit, tenant: Tenant = US, system: str = ""
    ) -> None:
        self.sessions = sessions
        self.habit = habit
        self.tenant = tenant
        self.history: list[Any] = [{**SYSTEM, "content": system} if system else SYSTEM]
        self.right: list[bool] = []
        self.turn: SessionTurn | None = None

    def step(self, *, change: Any = None, computed: int = 100, answer: str | None = None) -> None:
        """change: what the client does to the messages beside its habit."""
        number = next(self._numbers)
        shown = {"type": "image_url", "image_url": {"url": f"https://x/{number}.png"}}
        asked = [{"type": "text", "text": "what next?"}, shown]
        self.history.append({"role": "user", "content": asked})
        sent = self.habit.trim(self.history)
        turn = self.turn = ask(self.sessions, sent if change is None else change(sent), self.tenant)
        self.right.append(turn is not None and turn.found is not None)
        answer = f"click {number}" if answer is None else answer
        self.history.append({"role": "assistant", "content": answer})
        if turn is None:
            return
        cached = CachedTokens(400)
        parts = (Text(answer),) if answer else ()
        turn.hear(AnswerUpdate(0, answer, 1, cached=cached, parts=parts))
        self.sessions.predict(turn)
        for each in turn.session.expected:
            each.computed = computed

    def run(self, steps: int, **more: Any) -> list[bool]:
        for _ in range(steps):
            self.step(**more)
        return self.right


REMINDED = Habit(3, reminder="Be careful.")
PINNED = Habit(2, first=1)
TWICE = Habit(4, batch=2, form="nothing")


@pytest.mark.parametrize(
    ("habit", "cuts"),
    [
        (HABITS["keep-1"], {3, 4, 5, 6, 7, 8, 9, 10, 11}),
        (HABITS["keep-3"], {4, 5, 6, 7, 8, 9, 10, 11}),
        (HABITS["keep-5"], {6, 7, 8, 9, 10, 11}),
        (HABITS["fours"], {10}),
        (HABITS["vanish"], {3, 4, 5, 6, 7, 8, 9, 10, 11}),
        (HABITS["window"], {5, 6, 7, 8, 9, 10, 11}),
        (HABITS["messages"], {5, 6, 7, 8, 9, 10, 11}),
        (replace(HABITS["messages"], keep=4, batch=2), {7, 9, 11}),
        (Habit(3, form="content"), {4, 5, 6, 7, 8, 9, 10, 11}),
        (Habit(2, batch=2, form="content"), {5, 7, 9, 11}),
        (REMINDED, {4, 5, 6, 7, 8, 9, 10, 11}),
        (PINNED, {4, 5, 6, 7, 8, 9, 10, 11}),
        (TWICE, {7, 9, 11}),
    ],
    ids=[
        *("keep-1", "keep-3", "keep-5", "fours", "vanish", "window", "messages", "messages-twos"),
        *("content", "content-twos", "reminded", "first", "twos"),
    ],
)
def test_every_cut_after_the_first_is_known_before_it_comes(habit: Habit, cuts: set[int]) -> None:
    """By the first cut, step by step from 0, which published harnesses have foretold where no text
    stands for an image. A cut that needs no change is not prepared for.
    """
    agent = Agent(Sessions(), habit)
    right = agent.run(12)
    assert {step for step, each in enumerate(right) if each} == cuts


@pytest.mark.parametrize("system", ["", "Today is the 2nd."], ids=["same", "other"])
def test_a_second_task_begins_with_the_rule(system: str) -> None:
    """Under the same system prompt, or another of the client's."""
    sessions = Sessions()
    Agent(sessions, HABITS["keep-5"]).run(8)
    second = Agent(sessions, HABITS["keep-5"], system=system)
    assert second.run(8)[5:] == [True] * 3, "the first cut too"


def test_guesses_end_after_two_wrong_ones_and_cost_no_trust() -> None:
    """An agent that only appends is guessed about twice, and a rule that is seen still counts."""
    sessions = Sessions()
    Agent(sessions, HABITS["append"]).run(8)
    assert not sessions.trusts(US, guessed=True) and sessions.trusts(US)
    assert sessions.trusts(("another", "client", ""), guessed=True)
    assert Agent(sessions, HABITS["keep-3"]).run(6)[4:] == [True, True]
    assert sessions.trusts(US)


def test_a_rule_of_another_agent_of_the_client_is_tried_twice() -> None:
    sessions = Sessions()
    Agent(sessions, HABITS["keep-3"]).run(8)
    other = Agent(sessions, HABITS["append"], system="You answer questions.")
    assert not any(other.run(8))
    assert not sessions.trusts(US, guessed=True) and sessions.trusts(US)


def test_sessions_with_the_same_answers_are_told_apart() -> None:
    """As of a model that says `click` at every step, or nothing."""
    sessions = Sessions()
    agents = [Agent(sessions, HABITS["keep-3"]) for _ in range(8)]
    for step in range(9):
        for agent in agents:
            agent.step(answer=("click", "")[step % 2])
    for agent in agents:
        assert agent.right[4:] == [True] * 5


def test_nothing_is_prepared_behind_the_answer_that_ends_a_task() -> None:
    """The one without a call, after answers with one."""
    messages = [SYSTEM, {"role": "user", "content": "Begin."}, *used("a"), *used("b")]
    chat = Chat(tuple(message_from_object(m, f"messages[{i}]") for i, m in enumerate(messages)))
    images = [opened(f"https://x/{name}.png") for name in "ab"]
    for answer, prompts in ((CallStarted(0, "c", "look"), 1), (Text("Done."), 0)):
        request = GenerationRequest(
            chat, extras=(AskedEdit(ClearToolUses(tokens=None, uses=2, keep=2)),)
        )
        turn = Sessions().follow(US, request, images)
        assert turn is not None
        turn.hear(AnswerUpdate(0, "", 1, parts=(answer,)))
        assert len(Sessions().predict(turn)) == prompts


def test_nothing_is_learned_across_salts() -> None:
    sessions = Sessions()
    Agent(sessions, HABITS["keep-3"]).run(8)
    for other in (("other", "client", ""), ("salt", "other", ""), ("salt", "client", "adapter")):
        stranger = Agent(sessions, HABITS["keep-3"], other)
        assert stranger.run(5) == [False] * 4 + [True], other
    # The same conversation under another salt is another session.
    agent = Agent(sessions, HABITS["keep-3"])
    agent.run(6)
    turn = ask(sessions, agent.habit.trim(agent.history), ("fresh", "client", ""))
    assert turn is not None and turn.session.rule is None and turn.found is None


def test_a_client_whose_predictions_were_wrong_twice_is_not_trusted_until_they_are_right() -> None:
    sessions = Sessions()
    agent = Agent(sessions, HABITS["keep-3"])
    agent.run(6)
    assert sessions.trusts(US)
    for _ in range(MAX_WRONG):
        agent.habit = replace(agent.habit, stub=f"gone {random.random()}")
        agent.step()
    assert not sessions.trusts(US)
    agent.step()
    agent.step()
    assert agent.right[-1] and sessions.trusts(US)
    assert sessions.trusts(("another", "client", ""))


def test_a_clock_in_the_system_prompt_is_not_learned_and_is_named() -> None:
    ticks = count()

    def tick(sent: list[Any]) -> list[Any]:
        return [{"role": "system", "content": f"It is {next(ticks)} o'clock."}, *sent[1:]]

    agent = Agent(Sessions(), HABITS["keep-3"])
    assert not any(agent.run(8, change=tick))
    assert agent.turn is not None
    assert agent.turn.report.changed == "messages[0] changed: text changed"
    assert "the time" in agent.turn.report.advice


def test_a_cut_is_named_by_the_message_that_changed() -> None:
    agent = Agent(Sessions(), HABITS["keep-3"])
    agent.run(6)
    assert agent.turn is not None
    assert agent.turn.report.changed == "messages[5] changed: image became text"


def test_what_was_prepared_and_used_is_told() -> None:
    agent = Agent(Sessions(), HABITS["keep-3"])
    agent.run(4)
    assert agent.turn is not None
    (expected,) = agent.turn.session.expected
    expected.base, expected.length = 150, 300
    agent.step()
    assert (agent.turn.report.prepared, agent.turn.report.used) == (150, 150)
    agent.step(change=lambda sent: [*sent[:1], {"role": "user", "content": "no"}, *sent[1:]])
    assert (agent.turn.report.prepared, agent.turn.report.used) == (100, 0)


def test_a_request_sent_again_is_no_evidence() -> None:
    agent = Agent(Sessions(), HABITS["keep-3"])
    agent.run(5)
    asked = agent.habit.trim(agent.history[:-1])
    again = ask(agent.sessions, asked)
    assert again is not None and agent.turn is not None
    assert again.session is agent.turn.session and again.session.expected
    agent.step()
    assert agent.right[-1]


def test_lying_sessions_teach_nothing_and_raise_nothing() -> None:
    """Messages dropped, doubled, reordered and reworded at random."""
    draw = random.Random(3)
    sessions = Sessions()

    def lie(sent: list[Any]) -> list[Any]:
        body = [m for m in sent[1:] if draw.random() < 0.8]
        draw.shuffle(body)
        return [sent[0], *body, *draw.choices(sent[1:], k=draw.randrange(3)), sent[-1]]

    for _ in range(40):
        habit = draw.choice([*HABITS.values(), REMINDED, PINNED])
        Agent(sessions, habit).run(10, change=lie)
    assert len(sessions) <= MAX_SESSIONS


def test_sessions_are_bounded_and_one_client_cannot_push_out_another() -> None:
    sessions = Sessions()
    ours = Agent(sessions, HABITS["keep-3"])
    ours.run(6)
    for _ in range(MAX_SESSIONS + 100):
        Agent(sessions, HABITS["append"], ("flood", "client", "")).run(2)
    assert len(sessions) <= MAX_SESSIONS
    ours.step()
    assert ours.right[-1]


def test_a_chat_that_has_lost_every_answer_is_not_followed() -> None:
    """As `truncation: auto` may leave it."""
    shown = {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
    chat = Chat((message_from_object({"role": "user", "content": [shown]}, "messages[0]"),))
    assert Sessions().follow(US, GenerationRequest(chat), [opened("https://x/a.png")]) is None


def test_a_request_that_another_has_followed_foretells_nothing() -> None:
    sessions = Sessions()
    agent = Agent(sessions, HABITS["keep-3"])
    agent.run(6, computed=0)
    late = agent.turn
    agent.step(computed=0)
    assert late is not None and agent.turn is not None
    expected = agent.turn.session.expected
    assert expected and not sessions.predict(late)
    assert agent.turn.session.expected is expected


def used(id: str) -> list[Any]:
    """A tool use with a screenshot."""
    call = {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    shown = [{"type": "image_url", "image_url": {"url": f"https://x/{id}.png"}}]
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": shown},
    ]


def test_a_declared_edit_foretells_its_first_cut() -> None:
    """Without an earlier request: the server knows what it will clear."""
    edit = ClearToolUses(tokens=None, uses=2, keep=2)
    messages = [SYSTEM, {"role": "user", "content": "Begin."}, *used("a"), *used("b")]
    chat = Chat(tuple(message_from_object(m, f"messages[{i}]") for i, m in enumerate(messages)))
    sessions = Sessions()
    images = [opened(f"https://x/{name}.png") for name in "ab"]
    turn = sessions.follow(US, GenerationRequest(chat, extras=(AskedEdit(edit),)), images)
    assert turn is not None
    turn.hear(AnswerUpdate(0, "", 1, parts=(CallStarted(0, "c", "look"), CallArguments(0, "{}"))))
    (prediction,) = sessions.predict(turn)
    texts = [m.content[0] for m in prediction.messages if m.role == "tool" and m.content]
    assert [isinstance(each, MessageText) for each in texts] == [True, False], "the oldest of three"
    assert prediction.messages[-1].role == "assistant"
