"""Compare answers with the server's own answers to the same requests when nothing is cached.

This needs no model that can read. An answer is about its own image if its log-probabilities (or its
text, if the server reports none) are those of its own cold answer, and not those of the cold answer
about another image.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from saccade_bench.prove.client import Asker, JudgedAnswer, Refused, SentRequest

CLOSER = 4.0
"""How many times as close one cold answer must be as another. Reusing cached entries changes the
last bits of log-probabilities in many servers.
"""


@dataclass(frozen=True, slots=True)
class ColdFinding:
    """How many of a case's answers are those of their own cold answer, or of another image's.

    `undecided` answers are as close to one as to the other. `requests` are the bodies for the first
    wrong answer: about the other image, and about its own.
    """

    own: int = 0
    others: int = 0
    undecided: int = 0
    requests: tuple[dict[str, Any], ...] = ()


def distance(one: JudgedAnswer, other: JudgedAnswer) -> float:
    """Return the largest difference of log-probabilities, up to the first token that differs.

    Without log-probabilities, equal texts have the distance 0, and others 1.
    """
    if not (one.scores and other.scores):
        return float(one.text != other.text)
    largest = 0.0
    for mine, theirs in zip(one.scores, other.scores):
        listed, beside = dict(mine), dict(theirs)
        floors = min(listed.values()), min(beside.values())
        for token in listed.keys() | beside.keys():
            # A token that is not listed has at most the lowest listed log-probability.
            here, there = listed.get(token, floors[0]), beside.get(token, floors[1])
            largest = max(largest, abs(here - there))
        if mine[0][0] != theirs[0][0]:
            break
    return largest


async def compare(exchanges: Sequence[SentRequest], cold: Asker) -> ColdFinding:
    """Send each body again to a server with nothing cached, and compare the answers.

    Bodies that refer to images by URL or `uuid` are left out: what they show is not in the body.
    """
    bodies = {_key(each.body): each.body for each in exchanges if _is_whole(each.body)}
    alone: dict[str, JudgedAnswer] = {}
    for key, body in bodies.items():
        try:
            alone[key] = await cold.send({**body, "model": cold.model})
        except (Refused, httpx.HTTPStatusError, httpx.TimeoutException):
            continue
    own = others = undecided = 0
    requests: tuple[dict[str, Any], ...] = ()
    for each in exchanges:
        key = _key(each.body)
        if key not in alone:
            continue
        mine = alone[key]
        unlike = {other: answer for other, answer in alone.items() if distance(mine, answer) > 0}
        if not unlike:
            continue
        here = distance(each.answer, mine)
        apart = {other: distance(each.answer, answer) for other, answer in unlike.items()}
        nearest = min(apart, key=apart.__getitem__)
        if here * CLOSER < apart[nearest]:
            own += 1
        elif apart[nearest] * CLOSER < here:
            others += 1
            requests = requests or (bodies[nearest], each.body)
        else:
            undecided += 1
    return ColdFinding(own, others, undecided, requests)


def _key(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)


def _is_whole(body: dict[str, Any]) -> bool:
    """Return True if all images and files of a body are data URLs."""
    parts = [part for message in body["messages"] for part in message["content"]]
    return all(_is_inline(part) for part in parts if isinstance(part, dict))


def _is_inline(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "text"}:
            return True
        case {"image_url": {"url": str(url)}} | {"file": {"file_data": str(url)}}:
            return url.startswith("data:")
        case {"video": [*urls]}:
            return all(str(url).startswith("data:") for url in urls)
    return False
