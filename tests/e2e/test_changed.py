"""The trace and a header say what a screenshot changed: nothing, by bytes or by pixels, or a share.

They say nothing unless they are asked to.
"""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from saccade_bench.fixtures.server import Server
from tests.helpers.images import content, image_part, user
from tests.media.pictures import encode

pytestmark = pytest.mark.more

HEADER = "x-saccade-changed"
SCREEN = np.random.default_rng(49).integers(0, 255, (128, 160, 3), np.uint8)


def shot(pixels: Any, level: int = 6) -> dict[str, Any]:
    """A screenshot, in bytes that its compression decides."""
    return user(image_part(encode(pixels, compress_level=level)))


def with_square() -> Any:
    """The screen with another square of 32 pixels, 1 of its 20."""
    pixels = SCREEN.copy()
    pixels[:32, :32] = 0
    return pixels


def ask(server: Server, *messages: Any, trace: bool = True, **more: Any) -> httpx.Response:
    """`trace` as a client asks for it. The salt is the test's own."""
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, **more}
    if trace:
        body["saccade"] = {"trace": True}
    return server.send("/v1/chat/completions", body).raise_for_status()


def answered(answer: httpx.Response) -> dict[str, Any]:
    return {"role": "assistant", "content": content(answer.json())}


def changes(answer: httpx.Response) -> list[tuple[str | None, float | None]]:
    images = answer.json()["saccade"]["images"]
    return [(each.get("same_as"), each.get("changed")) for each in images]


def test_a_growing_history_tells_what_each_step_changed(server: Server) -> None:
    salt: dict[str, Any] = {"cache_salt": "grows"}
    history: list[Any] = [shot(SCREEN)]
    seen: list[tuple[str | None, float | None]] = [(None, None)]
    steps: list[tuple[Any, tuple[str | None, float | None], str]] = [
        (shot(SCREEN), ("messages[0].content[0]", 0), "0"),
        (shot(SCREEN, level=1), ("messages[2].content[0]", 0), "0"),
        (shot(with_square()), (None, 0.05), "0.05"),
        (shot(SCREEN), ("messages[4].content[0]", 0.05), "0.05"),
        (shot(SCREEN[:96]), (None, None), ""),
    ]
    first = ask(server, *history, **salt)
    assert changes(first) == seen
    assert HEADER not in first.headers
    history.append(answered(first))
    for screen, change, header in steps:
        history.append(screen)
        answer = ask(server, *history, **salt)
        seen.append(change)
        assert changes(answer) == seen
        assert answer.headers.get(HEADER, "") == header
        history.append(answered(answer))


def test_a_stream_tells_it_before_the_answer(server: Server) -> None:
    asked = ask(server, shot(SCREEN), shot(SCREEN, level=1), stream=True, cache_salt="streams")
    assert asked.headers[HEADER] == "0"
    assert '"same_as":"messages[0].content[0]"' in asked.text


def test_it_costs_no_answer_to_ask(server: Server) -> None:
    """An agent waits for its page with `max_tokens: 0`."""
    salt: dict[str, Any] = {"cache_salt": "waits"}
    before = ask(server, shot(SCREEN), **salt)
    history = (shot(SCREEN), answered(before))
    waiting = ask(server, *history, shot(SCREEN, level=1), **salt, max_tokens=0)
    assert waiting.headers[HEADER] == "0"
    assert waiting.json()["usage"]["completion_tokens"] == 0
    done = ask(server, *history, shot(with_square()), **salt, max_tokens=0)
    assert done.headers[HEADER] == "0.05"


def test_a_client_that_sends_the_newest_alone_is_told_too(server: Server) -> None:
    salt: dict[str, Any] = {"cache_salt": "newest"}
    first = ask(server, shot(SCREEN), **salt)
    gone = {"role": "user", "content": "(a screenshot)"}
    history: list[Any] = [gone, answered(first)]
    second = ask(server, *history, shot(with_square()), **salt)
    history += [gone, answered(second)]
    third = ask(server, *history, shot(with_square()), **salt)
    assert changes(third) == [("an earlier request", 0)]


def test_other_salts_and_other_requests_tell_nothing(server: Server) -> None:
    ask(server, shot(SCREEN), cache_salt="one")
    assert changes(ask(server, shot(SCREEN, level=1), cache_salt="two")) == [(None, None)]
    silent = ask(server, shot(SCREEN), shot(SCREEN), cache_salt="one", trace=False)
    assert HEADER not in silent.headers
    assert "saccade" not in silent.json()
