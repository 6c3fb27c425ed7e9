"""Prompts in answers: `echo`, and `prompt_logprobs` in vLLM's shape."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from saccade.api import prompt_logprobs as prompts
from saccade.front import readings
from tests.helpers.echo import score
from tests.helpers.served import TOKENIZER, Served

HI = [{"role": "user", "content": "Hi"}]
PROMPT = "How many red circles are there, é or ✓?"
TOKENS = TOKENIZER.encode(PROMPT)


def complete(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.http.post("/v1/completions", json={"prompt": PROMPT, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_entries(entries: list[Any], tokens: list[int] | tuple[int, ...], top: int) -> None:
    """vLLM's list over the prompt's tokens."""
    assert len(entries) == len(tokens) and entries[0] is None
    for place, (token, entry) in enumerate(zip(tokens[1:], entries[1:]), 1):
        assert next(iter(entry)) == str(token), "the prompt's own token comes first"
        assert len(entry) == (2, 2, 2, 3)[top] - (top == 0)
        own = entry[str(token)]
        assert own == {
            "logprob": score(place, 0),
            "rank": 2,
            "decoded_token": TOKENIZER.decode([token]),
        }
        if top:
            best = entry[str(token + 1)]
            assert (best["logprob"], best["rank"]) == (score(place, 1), 1)


@pytest.mark.parametrize("top", [0, 1, 3])
def test_a_chat_tells_of_its_prompts_tokens(served: Served, top: int) -> None:
    answer = served.http.post(
        "/v1/chat/completions", json={"messages": HI, "prompt_logprobs": top, "n": 2}
    ).json()
    first, second = served.submitted
    assert (first.prompt_logprobs, second.prompt_logprobs) == (top, None)
    check_entries(answer["prompt_logprobs"], first.tokens, top)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello!"] * 2


def test_who_does_not_ask_is_not_told(served: Served) -> None:
    answer = served.http.post("/v1/chat/completions", json={"messages": HI}).json()
    assert "prompt_logprobs" not in answer
    assert "prompt_logprobs" not in complete(served)["choices"][0]


def test_each_choice_of_a_completion_tells_of_its_own_prompt(served: Served) -> None:
    other = TOKENIZER.encode("And how many are blue?")
    answer = complete(served, prompt=[TOKENS, other], n=2, prompt_logprobs=1)
    for choice in answer["choices"]:
        check_entries(choice["prompt_logprobs"], (TOKENS, other)[choice["index"] // 2], 1)
        assert choice["text"] == "Hello!" and choice["logprobs"] is None


def test_an_echo_comes_before_each_answer(served: Served) -> None:
    answer = complete(served, echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT + "Hello!"] * 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert served.submitted[0].prompt_logprobs is None, "nothing is scored for it"
    assert complete(served, prompt=TOKENS, echo=True)["choices"][0]["text"] == PROMPT + "Hello!"


def test_an_echo_is_streamed(served: Served) -> None:
    chunks = served.openai.completions.create(
        model="demo", prompt=PROMPT, echo=True, stream=True, n=2
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: PROMPT + "Hello!", 1: PROMPT + "Hello!"}


@pytest.mark.parametrize("max_tokens", [0, 16])
def test_an_echo_with_logprobs_has_openais_shape(served: Served, max_tokens: int) -> None:
    answer = complete(served, echo=True, logprobs=2, max_tokens=max_tokens)
    choice = answer["choices"][0]
    lists = choice["logprobs"]
    said = [*TOKENIZER.encode("Hello!"), 2] if max_tokens else []
    assert choice["text"] == PROMPT + ("Hello!" if max_tokens else "")
    assert {len(each) for each in lists.values()} == {len(TOKENS) + len(said)}
    scores = [score(place, 0) for place in range(1, len(TOKENS))]
    assert lists["token_logprobs"] == [None, *scores, *[-0.5] * len(said)]
    assert lists["top_logprobs"][0] is None
    for place, found in enumerate(lists["top_logprobs"][1 : len(TOKENS)], 1):
        assert max(found.values()) == score(place, 1) and len(found) <= 2
    # each offset is where a token's text begins in the whole
    whole = choice["text"]
    ends = [*lists["text_offset"][1:], len(whole)]
    for name, start, end in zip(lists["tokens"][:-1], lists["text_offset"], ends):
        assert "\ufffd" in name or whole[start:end] == name
    assert answer["usage"]["completion_tokens"] == len(said)
    assert choice["finish_reason"] == ("stop" if max_tokens else "length")
    assert "prompt_logprobs" not in choice


def test_an_echos_logprobs_and_prompt_logprobs_go_together(served: Served) -> None:
    answer = complete(served, echo=True, logprobs=1, prompt_logprobs=3, max_tokens=0)
    choice = answer["choices"][0]
    check_entries(choice["prompt_logprobs"], TOKENS, 3)
    assert {len(each) for each in choice["logprobs"]["top_logprobs"][1:]} == {1}


def test_no_answer_may_be_wanted_where_the_prompt_is_shown(served: Served) -> None:
    body = {"messages": HI, "prompt_logprobs": 0, "max_tokens": 0, "logprobs": True}
    answer = served.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert complete(served, echo=True, max_tokens=0)["choices"][0]["text"] == PROMPT


PREWARM = {"prompt_cache_options": {"prewarm": True}}


@pytest.mark.parametrize(
    "path, fields",
    [
        ("chat/completions", {"messages": HI, "max_tokens": 0}),
        ("chat/completions", {"messages": HI, "max_completion_tokens": 0, "min_tokens": 4}),
        ("chat/completions", {"messages": HI, **PREWARM}),
        ("completions", {"prompt": "x", "max_tokens": 0}),
        ("completions", {"prompt": "x", **PREWARM}),
        ("responses", {"input": "x", **PREWARM}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_computed_for_later(
    served: Served, path: str, fields: dict[str, Any], stream: bool
) -> None:
    told = served.http.post(f"/v1/{path}", json={**fields, "stream": stream})
    assert told.status_code == 200 and "Hello!" not in told.text
    sampling = served.submitted[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (1, 0)
    if stream:
        return
    answer = told.json()
    if path == "responses":
        assert (answer["status"], answer["output"], answer["usage"]["output_tokens"]) == (
            "completed",
            [],
            0,
        )
    else:
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


def test_the_questions_of_decisions_are_bounded_together(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "MAX_TOKENS", 100)
    question = {"type": "predicate", "instructions": "It is what it is. " * 5}
    body = {"input": "x " * 90, "questions": [question] * 7}
    refused = served.http.post("/v1/decisions", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("questions", "too_many_tokens")
    told = re.fullmatch(
        r"questions: the first (\d) of 7 have (\d+) tokens; the limit for all is 100: .*",
        error["message"],
    )
    assert told and 1 < int(told[1]) < 7 and 100 < int(told[2]) < 200


def test_decisions_are_not_computed_for_later(served: Served) -> None:
    question = {"name": "q", "type": "predicate", "instructions": "It is."}
    body = {"input": "x", "questions": [question], **PREWARM}
    refused = served.http.post("/v1/decisions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_cache_options.prewarm"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("chat/completions", {"prompt_logprobs": True}, "prompt_logprobs"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"echo": True}, "echo"),
        ("completions", {"prompt_logprobs": 10**30}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ("completions", {"echo": True, "logprobs": 21}, "logprobs"),
        ("completions", {"echo": True, "best_of": 2}, "best_of"),
        ("completions", {"echo": True, "prompt": [5, 2**40]}, "prompt"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    prompt = {"messages": HI} if "chat" in path else {"prompt": PROMPT}
    answer = served.http.post(f"/v1/{path}", json={**prompt, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not served.submitted


def test_more_scores_than_are_written_are_refused_before_any_work(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPT_SCORES", 2 * len(TOKENS) * 4)
    assert complete(served, prompt_logprobs=3, n=2)
    served.engine.received.clear()
    body = {"prompt": PROMPT, "prompt_logprobs": 3, "n": 3}
    answer = served.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "prompt_logprobs"
    assert str(3 * len(TOKENS) * 4) in error["message"] and not served.submitted


def test_a_long_prompt_is_written_in_pieces_in_threads(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    whole = prompts.in_pieces

    def counted(entries: Any, size: int) -> Any:
        for piece in whole(entries, size):
            written.append(len(piece))
            yield piece

    monkeypatch.setattr(prompts, "in_pieces", counted)
    monkeypatch.setattr(prompts, "_PIECE", 64)
    threads: list[str] = []
    in_thread = served.front.intake.in_thread

    async def noted(work: Any) -> Any:
        threads.append("")
        return await in_thread(work)

    monkeypatch.setattr(served.front.intake, "in_thread", noted)
    tokens = TOKENS * 8
    with served.http.stream(
        "POST", "/v1/completions", json={"prompt": tokens, "prompt_logprobs": 20}
    ) as answer:
        assert "content-length" not in answer.headers
        body = answer.read()
    entries = json.loads(body)["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(tokens)
    assert len(written) >= len(tokens) // 4 and len(threads) >= len(written)
    assert max(written) < 64 * 100


def test_a_mark_of_an_image_among_token_ids_is_refused_by_the_field(served: Served) -> None:
    mark = TOKENIZER.backend.token_to_id("<|image_pad|>")
    answer = served.http.post("/v1/completions", json={"prompt": [40, mark, 41]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "prompt" and "1 image placeholders for 0 images" in error["message"]
