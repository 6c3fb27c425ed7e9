"""What a client predicts of an answer, or has been answered before, is guessed and counted in
`usage`, and changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.tiny import picture
from tests.helpers.images import content, image_part, png_url, text_part, user

pytestmark = pytest.mark.more

LENGTH = 40
QUESTION = "Tell me a long story about it."
SOME = 8
"""Tokens that are right at least, though a text may be other tokens than those it was drawn as."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In float32: rows of 16 bits are not exact on every processor, so drawn answers may differ."""
    folder = tmp_path_factory.mktemp("predictions")
    with serving("demo", folder, "--speculative", "always", "--dtype", "float32") as server:
        yield server


def chat(seed: int, **more: Any) -> dict[str, Any]:
    shown = image_part(picture(64, 64, seed=seed))
    body = {"messages": [user(shown, text_part(QUESTION))], "max_tokens": LENGTH}
    return body | {"temperature": 1.0, "seed": 7, "ignore_eos": True} | more


def ask(server: Server, body: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """The answer, and its count of guesses."""
    told = server.post("/v1/chat/completions", body)
    usage = told["usage"]
    assert usage["completion_tokens"] == LENGTH
    return content(told), usage.get("completion_tokens_details", {})


@pytest.mark.parametrize("parts", [False, True])
def test_a_prediction_is_accepted_as_far_as_it_is_right(server: Server, parts: bool) -> None:
    salt = f"right {parts}"
    text, _ = ask(server, chat(0, cache_salt="first"))
    halves: Any = [text_part(text[:20]), text_part(text[20:])]
    prediction = {"type": "content", "content": halves if parts else text}
    again, counted = ask(server, chat(0, cache_salt=salt, prediction=prediction))
    assert again == text
    assert counted["accepted_prediction_tokens"] > SOME
    assert server.metric("saccade_accepted_tokens_total", source="prediction") > SOME


def test_a_wrong_prediction_changes_nothing_but_what_was_rejected(server: Server) -> None:
    text, _ = ask(server, chat(1, cache_salt="first"))
    wrong = {"type": "content", "content": "It was a dark and stormy night; " * 600}
    again, counted = ask(server, chat(1, cache_salt="wrong", prediction=wrong))
    assert again == text
    assert counted["rejected_prediction_tokens"] > 0


def test_what_was_answered_before_is_counted_in_streams_and_responses_too(server: Server) -> None:
    text, _ = ask(server, chat(2))
    streamed = ""
    body = chat(2, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
        lines = [each[6:] for each in answer.iter_lines() if each.startswith("data: {")]
    chunks = [httpx.Response(200, text=line).json() for line in lines]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed += choice["delta"].get("content") or ""
    counted = chunks[-1]["usage"]["completion_tokens_details"]
    assert streamed == text and counted["accepted_prediction_tokens"] > LENGTH // 2
    parts = [
        {"type": "input_image", "image_url": png_url(picture(64, 64, seed=3))},
        {"type": "input_text", "text": QUESTION},
    ]
    asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": LENGTH}
    first, again = (server.post("/v1/responses", asked | {"temperature": 0}) for _ in range(2))
    assert first["output"][0]["content"] == again["output"][0]["content"]
    details = again["usage"]["output_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0 and "reasoning_tokens" in details


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"type": "words", "content": "text"},
        {"type": "content", "content": 7},
        {"type": "content", "content": [{"type": "image", "text": "x"}]},
        {"type": "content"},
    ],
)
def test_what_is_no_prediction_is_refused_by_name(server: Server, prediction: Any) -> None:
    body = chat(0, prediction=prediction)
    error = server.post("/v1/chat/completions", body, status=400)["error"]
    assert error["param"].startswith("prediction")
