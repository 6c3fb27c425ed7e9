"""The load generator: sends chats at their scheduled times and records the outcomes.

It also measures its own delays: how late each request is sent, and how late the event loop runs
callbacks. Messages are serialized before the clock starts, so that sending only joins bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from saccade_bench.load.client import BenchClient, BenchReply, Failure
from saccade_bench.load.workload import PreparedChat, PreparedTurn, Template, answer_message
from saccade_bench.options import LoadOptions

TICK = 0.005  # seconds between two measurements of the event loop's delay


@dataclass(frozen=True, slots=True)
class Record:
    """One request and its reply.

    `session` and `round` are indices of the chat and of the turn in it. `due` is when the request
    should have been sent, on the clock of `BenchReply.sent`. `prior` is the number of output tokens
    of the chat's earlier turns.
    """

    session: int
    round: int
    turn: PreparedTurn
    tenant: str
    body_bytes: int
    due: float
    prior: int
    reply: BenchReply


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All records in order of completion, the start and end of the run on the clock of
    `BenchReply.sent`, and the measured delays of the event loop in seconds.
    """

    records: tuple[Record, ...]
    start: float
    end: float
    loop_delays: tuple[float, ...]


Told = Callable[[Record], None]


def arrival_times(load: LoadOptions, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return when each session is due, in seconds after the start. The first is due at once.

    Intervals are gamma-distributed with shape `burstiness` and mean 1 / rate. Shape 1 is a Poisson
    process.
    """
    if load.request_rate == float("inf"):
        return np.zeros(count)
    dice = np.random.Generator(np.random.PCG64(np.random.SeedSequence((load.seed, 11))))
    gaps = dice.gamma(load.burstiness, 1 / (load.request_rate * load.burstiness), size=count)
    gaps[0] = 0.0
    return np.cumsum(gaps)


async def drive(
    client: BenchClient,
    chats: Sequence[PreparedChat],
    template: Template,
    load: LoadOptions,
    told: Told | None = None,
) -> LoadRun:
    """Send all chats, and call `told` with the record of each finished request.

    If a turn fails, the remaining turns of its chat are recorded as "not sent".
    """
    times = arrival_times(load, len(chats))
    dues = [at if chat.due is None else chat.due for at, chat in zip(times, chats, strict=True)]
    permits = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
    records: list[Record] = []
    delays: list[float] = []

    def note(record: Record) -> None:
        records.append(record)
        if told:
            told(record)

    async def hold(number: int, due: float) -> None:
        # A chat that waits for a permit is due once it has one: this wait is the purpose of a
        # concurrency limit, and not a delay of the generator.
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        queued = permits.locked() if isinstance(permits, asyncio.Semaphore) else False
        async with permits:
            await _hold_chat(
                client,
                template,
                number,
                chats[number],
                time.perf_counter() if queued else due,
                note,
            )

    watch = asyncio.create_task(_watch_loop(delays))
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(len(chats)):
            group.create_task(hold(number, start + float(dues[number])))
    end = max((record.reply.done for record in records), default=start)
    watch.cancel()
    records.sort(key=lambda record: (record.reply.sent, record.session, record.round))
    return LoadRun(tuple(records), start, end, tuple(delays))


async def _hold_chat(
    client: BenchClient, template: Template, number: int, chat: PreparedChat, due: float, note: Told
) -> None:
    answers: list[bytes] = []
    prior = 0
    for place, turn in enumerate(chat.turns):
        if place:
            due = time.perf_counter() + turn.think
        body = template.body(chat, place, answers)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        reply = await client.stream(body)
        note(Record(number, place, turn, chat.tenant, len(body), due, prior, reply))
        if reply.failure:
            for later in range(place + 1, len(chat.turns)):
                none = BenchReply(
                    reply.done,
                    (),
                    reply.done,
                    failure=Failure("not sent", "an earlier round of its chat failed"),
                )
                note(
                    Record(
                        number, later, chat.turns[later], chat.tenant, 0, reply.done, prior, none
                    )
                )
            return
        prior += 0 if chat.alone else reply.usage.completion or 0
        answers.append(answer_message(reply.text))


async def _watch_loop(delays: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        delays.append(max(0.0, time.perf_counter() - before - TICK))
