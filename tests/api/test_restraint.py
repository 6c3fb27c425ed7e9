"""What OCR models' and vLLM's users ask beside sampling reaches the engine in tokens, or is refused
by name, in chats, completions and responses.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from saccade.core.token_rules import NO_RULES, NoRepeat, ThinkingBudget, TokenRules
from saccade.core.types import Request
from saccade.front.answer_rules import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_NGRAM,
    AnswerRules,
)
from saccade.text.prompt.template import Tokenizer
from tests.helpers.images import data_url, png
from tests.helpers.served import TOKENIZER, Served

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}
END = TOKENIZER.encode("<|im_end|>")[0]


def post(served: Served, path: str = "/v1/chat/completions", **body: Any) -> Any:
    return served.http.post(path, json={"model": "demo", **BODIES[path], **body})


def submitted(served: Served, path: str = "/v1/chat/completions", **body: Any) -> Request:
    answer = post(served, path, **body)
    assert answer.status_code == 200, answer.text
    return served.submitted[-1]


def text(served: Served, **body: Any) -> str:
    answer = post(served, **body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.first
@pytest.mark.parametrize("path", BODIES)
def test_rules_reach_the_engine_in_tokens(served: Served, path: str) -> None:
    rules = submitted(
        served,
        path,
        allowed_token_ids=[7, 9, 7],
        bad_words=["red", ""],
        no_repeat_ngram_size=3,
    ).rules
    assert rules.allowed == (7, 9)
    assert rules.no_repeat == NoRepeat(3)
    plain, spaced = TOKENIZER.encode("red"), TOKENIZER.encode(" red")
    assert plain[0] != spaced[0] and len(plain) == len(spaced)
    assert rules.bad_words == (tuple(plain), tuple(spaced))
    extra = {"ngram_size": 30, "window_size": 90, "whitelist_token_ids": [4]}
    assert submitted(served, path, vllm_xargs=extra).rules.no_repeat == NoRepeat(
        30, 90, (4,), False
    )
    assert submitted(served, path, vllm_xargs={"ngram_size": 5}).rules.no_repeat == NoRepeat(
        5, 100, (), False
    )
    same = {"no_repeat_ngram_size": 4}
    assert submitted(served, path, vllm_xargs=same).rules.no_repeat == NoRepeat(4)
    neutral = {"no_repeat_ngram_size": 0, "bad_words": [], "vllm_xargs": {}, "priority": 0}
    request = submitted(served, path, **neutral, skip_special_tokens=True)
    assert request.rules is not None and request.rules == NO_RULES and request.priority == 0


@pytest.mark.first
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * (MAX_ALLOWED_TOKENS + 1)}, "allowed_token_ids"),
        ({"bad_words": ["x"] * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_words": ["x" * (MAX_BAD_WORD_CHARACTERS + 1)]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"no_repeat_ngram_size": MAX_NGRAM + 1}, "no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": 2, "vllm_xargs": {"ngram_size": 2}}, "no_repeat_ngram_size"),
        ({"vllm_xargs": {"ngram_size": MAX_NGRAM + 1}}, "vllm_xargs.ngram_size"),
        ({"vllm_xargs": {"window_size": 3}}, "vllm_xargs.ngram_size"),
        ({"vllm_xargs": {"ngram_size": 3, "window_size": 0}}, "vllm_xargs.window_size"),
        (
            {"vllm_xargs": {"ngram_size": 3, "whitelist_token_ids": [10**6]}},
            "vllm_xargs.whitelist_token_ids",
        ),
        ({"vllm_xargs": {"top_n_sigma": 1}}, "vllm_xargs.top_n_sigma"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"service_tier": "cheap"}, "service_tier"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = post(served, path, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(param), error
    assert not served.submitted


def test_a_stop_string_may_stay_in_the_text(served: Served) -> None:
    assert text(served, stop="llo") == "He"
    assert text(served, stop="llo", include_stop_str_in_output=True) == "Hello"
    last = TOKENIZER.encode("Hello!")[-1]
    assert text(served, stop_token_ids=[last]) == "Hello"
    assert text(served, stop_token_ids=[last], include_stop_str_in_output=True) == "Hello!"


def test_special_tokens_may_be_shown_and_the_end_is_none_of_them(served: Served) -> None:
    tokens = [*TOKENIZER.encode("He"), END, *TOKENIZER.encode("llo")]
    served.engine.reply = lambda request: tokens
    kept = {"ignore_eos": True, "max_tokens": len(tokens)}
    assert text(served, **kept) == "Hello"
    shown = text(served, skip_special_tokens=False, **kept)
    assert shown == TOKENIZER.decode(tokens) == "He<|im_end|>llo"
    # What ends the answer is shown with stop strings alone.
    served.engine.reply = lambda request: TOKENIZER.encode("Hi")
    ended = TOKENIZER.decode([2])
    assert text(served, skip_special_tokens=False) == "Hi"
    both = text(served, skip_special_tokens=False, include_stop_str_in_output=True)
    assert both == "Hi" + ended != "Hi"


def test_a_prompt_keeps_its_last_tokens(served: Served) -> None:
    path, long = "/v1/completions", "one two three four five six seven " * 50
    tokens = TOKENIZER.encode(long)
    assert post(served, path, prompt=long).status_code == 400, "the context has 512 tokens"
    assert submitted(served, path, prompt=long, truncate_prompt_tokens=7).tokens == tuple(
        tokens[-7:]
    )
    room = submitted(served, path, prompt=long, truncate_prompt_tokens=-1, max_tokens=12)
    assert room.tokens == tuple(tokens[-500:]) and room.sampling.max_tokens == 12
    assert submitted(served, path, prompt="one", truncate_prompt_tokens=99).tokens == tuple(
        TOKENIZER.encode("one")
    )


def test_a_cut_never_goes_through_an_image(served: Served) -> None:
    content = [
        {"type": "text", "text": "this comes before"},
        {"type": "image_url", "image_url": {"url": data_url(png("red"))}},
        {"type": "text", "text": "and this after"},
    ]
    messages = [{"role": "user", "content": content}]
    whole = submitted(served, messages=messages)
    (span,) = whole.spans
    behind = len(whole.tokens) - span.start
    cut = submitted(served, messages=messages, truncate_prompt_tokens=behind)
    assert cut.tokens == whole.tokens[span.start :] and cut.spans[0].start == 0
    assert text(served, messages=messages, truncate_prompt_tokens=behind) == "Hello!"
    answer = post(served, messages=messages, truncate_prompt_tokens=behind - 1)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "truncate_prompt_tokens"
    assert "messages[0].content[1]" in error["message"] and str(behind) in error["message"]


def test_priorities_and_tiers_become_one_number(served: Served) -> None:
    for fields, number in (
        ({"priority": 3}, 3),
        ({"priority": -3}, -3),
        ({"service_tier": "priority"}, -1),
        ({"service_tier": "flex", "priority": 2}, 3),
        ({"service_tier": "auto"}, 0),
    ):
        assert submitted(served, **fields).priority == number, fields


def test_reasoning_has_a_budget_where_the_tokenizer_has_its_tags(served: Served) -> None:
    tokenizer = Tokenizer(Backend.from_str(TOKENIZER.backend.to_str()), TOKENIZER.named_tokens)
    tokenizer.backend.add_tokens(["<think>", "</think>"])
    tags = [tokenizer.encode(tag)[0] for tag in ("<think>", "</think>")]
    for begun in (True, False):
        rules = AnswerRules(thinking_token_budget=5).tokens(tokenizer, begun)
        assert rules == TokenRules(thinking=ThinkingBudget(5, tags[0], tags[1], begun))
    # The demo model's has none: accepted, and said in the trace.
    answer = post(served, thinking_token_budget=5, saccade={"trace": True})
    assert answer.json()["saccade"]["ignored"] == ["thinking_token_budget"]
    assert submitted(served, thinking_token_budget=5).rules == NO_RULES


def test_words_of_a_stream_are_those_of_a_whole_answer(served: Served) -> None:
    lines = post(served, stop="llo", include_stop_str_in_output=True, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    told = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(told) == "Hello"
