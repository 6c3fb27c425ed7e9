"""Run conversations against a server, round by round, and measure each round.

Users send their requests concurrently, and wait for each other between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import numpy as np
import psutil

from saccade_bench.agents.run import AgentStep, AgentTask, ask, counters, mean
from saccade_bench.started import cpu_seconds
from saccade_bench.workloads.conversations import Conversation, Group, Sent

WAITING = "saccade_next_prompts_waiting"
ENCODED = "saccade_images_encoded_total"


@dataclass(frozen=True)
class PeerServer:
    """A server. `pid` is its process if it runs on this machine."""

    label: str
    url: str
    model: str
    pid: int | None = None


@dataclass(frozen=True)
class WorkloadRound:
    """The results of one round of a group. Values per request are means.

    new, seen: new and repeated images per request.
    prompt, computed: prompt tokens per request, and those that were not cached. `computed` is None
        if the server does not report cached tokens.
    encoded: images encoded for all users.
    ttft, cpu: ms per request.
    """

    new: int
    seen: int
    prompt: float
    computed: float | None
    encoded: float | None
    ttft: float
    cpu: float | None


def replay(
    target: PeerServer, group: Group, users: int, seed: int, task: AgentTask, pause: float
) -> list[WorkloadRound]:
    """Run a group's users against a server, with `pause` seconds between rounds."""
    _, make = group
    conversations = [make(seed + user) for user in range(users)]
    sent: Sequence[Sent] = [next(each) for each in conversations]
    found: list[WorkloadRound] = []
    fresh = httpx.Limits(max_keepalive_connections=0)  # some servers drop idle connections
    with httpx.Client(timeout=600, limits=fresh) as client, ThreadPoolExecutor(users) as pool:

        def step(each: Sent) -> AgentStep:
            return ask(target.url, target.model, each.messages, task, client)

        while sent:
            encoded = counters(target.url, client).get(ENCODED)
            cpu = spent_seconds(target.pid)
            steps = [*pool.map(step, sent)]
            spent = None if cpu is None else (spent_seconds(target.pid) or 0.0) - cpu
            after = counters(target.url, client).get(ENCODED, 0.0)
            found.append(
                WorkloadRound(
                    sent[0].new,
                    sent[0].seen,
                    mean([each.prompt for each in steps]),
                    mean([each.computed for each in steps])
                    if all(each.told for each in steps)
                    else None,
                    None if encoded is None else after - encoded,
                    1e3 * mean([each.ttft for each in steps]),
                    None if spent is None else 1e3 * spent / users,
                )
            )
            time.sleep(pause)
            while counters(target.url, client).get(WAITING):
                time.sleep(0.02)
            sent = [*_next(conversations, [each.text for each in steps])]
    return found


def _next(conversations: Sequence[Conversation], answers: Sequence[str]) -> Iterator[Sent]:
    for conversation, answer in zip(conversations, answers):
        try:
            yield conversation.send(answer)
        except StopIteration:
            return


def per_seen(rounds: Sequence[WorkloadRound], values: Sequence[float | None]) -> float | None:
    """Return by how much a value grows with each repeated image, by linear regression over rounds
    that have repeated images.

    Return None if a value is unknown, or if all rounds have the same number of repeated images.
    """
    found = [(each.seen, value) for each, value in zip(rounds, values) if each.seen]
    known = [(seen, value) for seen, value in found if value is not None]
    if len(known) < len(found) or len({seen for seen, _ in known}) < 2:
        return None
    images, figures = np.array(known).T
    slope, _ = np.polyfit(images, figures, 1)
    return float(slope)


def spent_seconds(pid: int | None) -> float | None:
    """Return the CPU seconds of a process and its descendants, or None if it is not found."""
    return None if pid is None or not psutil.pid_exists(pid) else cpu_seconds(pid)
