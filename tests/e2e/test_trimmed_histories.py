"""An agent that trims its history pays, from the fourth step on, what one that appends pays: the
next prompt is computed between its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from saccade_bench.agents.habits import HABITS, Habit, Json
from saccade_bench.agents.run import AgentStep, AgentTask, act, counters
from saccade_bench.fixtures.server import Server, serving

pytestmark = pytest.mark.more

TASK = AgentTask(steps=8, size=(224, 128), max_tokens=8)
FIRST = 3
"""The fourth step."""


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def server(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("agents")
    options = ("--dtype", "float32", "--served-model-name", "tiny")
    with serving(checkpoint(request.param), folder, *options) as server:
        yield server


def run(server: Server, habit: str, seed: int = 0) -> list[AgentStep]:
    """Run an agent whose action takes as long as the server needs for idle work."""
    task = replace(TASK, salt=habit, seed=seed)
    return run_task(server, HABITS[habit], task)


def run_task(server: Server, habit: Habit, task: AgentTask) -> list[AgentStep]:
    with httpx.Client(timeout=120) as client:

        def rest() -> None:
            deadline = time.monotonic() + 60
            while counters(server.url, client).get("saccade_next_prompts_waiting"):
                assert time.monotonic() < deadline
                time.sleep(0.01)

        return act(server.url, "tiny", habit, task, rest, client)


class Fickle(Habit):
    """Replaces each screenshot by a text of its own."""

    def _left(self, message: Json) -> Json:
        return Habit(stub=f"gone: {message['content'][0]['text']}")._left(message)


@pytest.fixture(scope="module")
def appended(server: Server) -> int:
    """What an agent that only appends pays, from the fourth step on."""
    return sum(step.computed for step in run(server, "append")[FIRST:])


FORETOLD = {"keep-1", "vanish", "window", "messages"}
"""Habits of published harnesses, or whose first cut comes before the fourth step."""


@pytest.mark.parametrize("habit", [each for each in HABITS if each != "append"])
def test_a_trimmed_history_costs_what_an_untrimmed_one_does(
    server: Server, appended: int, habit: str
) -> None:
    """From the first task on, or else from the second, to which the first has shown the rule."""
    for seed in range(2):
        steps = run(server, habit, seed)[FIRST:]
        if seed or habit in FORETOLD:
            assert sum(step.computed for step in steps) <= 1.05 * appended


def test_an_agent_that_only_appends_is_guessed_about_no_more(server: Server, appended: int) -> None:
    """After a task in which guesses were wrong twice."""
    assert appended
    before = server.metric("saccade_prepared_tokens_total", outcome="computed")
    steps = run(server, "append", seed=1)
    assert not any(step.vain for step in steps)
    assert server.metric("saccade_prepared_tokens_total", outcome="computed") == before


def test_nothing_is_computed_for_a_client_whose_predictions_were_wrong_twice(
    server: Server,
) -> None:
    steps = run_task(server, Fickle(1), replace(TASK, salt="fickle"))
    assert [bool(step.vain) for step in steps] == [False] * 3 + [True] * 2 + [False] * 3


def test_an_answer_tells_what_was_ready_and_where_its_prompt_broke_off(server: Server) -> None:
    run(server, "keep-3")
    before = server.metric("saccade_prepared_tokens_total", outcome="used")
    steps = run(server, "keep-3", seed=2)
    assert all(step.ahead > step.computed for step in steps[FIRST:]), "most of it was ready"
    assert not any(step.vain > step.ahead for step in steps)
    assert not any(step.ahead for step in steps[:FIRST])
    assert steps[5].changed == "messages[5] changed: image became text"
    used = server.metric("saccade_prepared_tokens_total", outcome="used") - before
    assert used == sum(step.ahead for step in steps)
