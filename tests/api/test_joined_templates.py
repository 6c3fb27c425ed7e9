"""Beside a template that joins strings, all dialects' text blocks make the string's prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from saccade.front.content import message_from_object
from saccade.front.conversation import Chat
from saccade.front.prompt_encoder import GenerationRequest
from saccade.ipc.messages import Submit
from saccade.text.prompt.template import ChatTemplate
from tests.helpers.images import data_url, png
from tests.helpers.served import TOKENIZER, Served, serving
from tests.text.templates import SMOLLM

URL = data_url(png())


@pytest.fixture(scope="module")
def joining() -> Iterator[Served]:
    template = ChatTemplate({"default": SMOLLM}, TOKENIZER.named_tokens)
    with serving(template=template, context=4096) as served:
        yield served


def prompts_of(served: Served, path: str, body: dict[str, Any]) -> set[str]:
    served.engine.received.clear()
    answer = served.http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    sent = [each for each in served.engine.received if isinstance(each, Submit)]
    return {TOKENIZER.decode(each.request.tokens) for each in sent}


def text(words: str, kind: str = "text", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "text": words, **fields}


def turn(role: str, words: str) -> str:
    return f"<|im_start|>{role}\n{words}<|im_end|>\n"


MARK: Any = {"cache_control": {"type": "ephemeral"}}
CALL = {"type": "function", "id": "c", "function": {"name": "look", "arguments": "{}"}}
PARTS = [text("One,", **MARK), text(""), text("two?")]
WHOLE = turn("system", "Be brief.\nVery.") + turn("user", "One,\ntwo?")
SYSTEM = [text("Be brief."), text("Very.", **MARK)]
BEGUN = f"{WHOLE}<|im_start|>assistant\n"
CONTINUED = f"{BEGUN}Well,"
CALLED = WHOLE + turn("assistant", "") + turn("tool", "sun\nrain") + "<|im_start|>assistant\n"
USER = {"role": "user", "content": PARTS}
MOST = {"max_tokens": 5}


def items(kind: str = "input_text") -> list[Any]:
    return [
        {"role": "developer", "content": [text("Be brief.", kind), text("Very.", kind)]},
        {"role": "user", "content": [text("One,", kind), text("two?", kind)]},
    ]


CHAT = [{"role": "developer", "content": SYSTEM}, USER]
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT}, BEGUN),
    "chat, a call without content": (
        "/v1/chat/completions",
        {
            "messages": [
                *CHAT,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [text("sun"), text("rain")]},
            ]
        },
        CALLED,
    ),
    "chat, continued": (
        "/v1/chat/completions",
        {
            "messages": [*CHAT, {"role": "assistant", "content": [text("Well,")]}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        CONTINUED,
    ),
    "chat, diagnosed": (
        "/v1/chat/completions",
        {"messages": CHAT, "prompt_cache_diagnostics": True},
        BEGUN,
    ),
    "chat, only got ready": (
        "/v1/chat/completions",
        {"messages": CHAT, "prompt_cache_options": {"prewarm": True}},
        BEGUN,
    ),
    "messages": ("/v1/messages", {"system": SYSTEM, "messages": [USER], **MOST}, BEGUN),
    "messages, results": (
        "/v1/messages",
        {
            "system": SYSTEM,
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [text("sun"), text("rain")],
                        }
                    ],
                },
            ],
            **MOST,
        },
        CALLED,
    ),
    "messages, continued": (
        "/v1/messages",
        {
            "system": SYSTEM,
            "messages": [USER, {"role": "assistant", "content": [text("Well,")]}],
            **MOST,
        },
        CONTINUED,
    ),
    "responses": ("/v1/responses", {"input": items()}, BEGUN),
    "responses, as chats name it": ("/v1/responses", {"input": items("text")}, BEGUN),
    "responses, results": (
        "/v1/responses",
        {
            "input": [
                *items(),
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [text("sun", "input_text"), text("rain", "input_text")],
                },
            ]
        },
        CALLED,
    ),
    "embeddings": (
        "/v1/embeddings",
        {
            "messages": [
                {"role": "system", "content": "Be brief.\nVery."},
                {"role": "user", "content": [text("One,"), text("two?")]},
            ]
        },
        BEGUN,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_text_blocks_are_the_prompt_of_the_string(joining: Served, case: str) -> None:
    path, body, expected = CASES[case]
    assert prompts_of(joining, path, body) == {expected}


def test_so_are_they_counted_and_decided_about(joining: Served) -> None:
    counted = joining.http.post("/tokenize", json={"model": "demo", "messages": CHAT}).json()
    assert TOKENIZER.decode(counted["tokens"]) == BEGUN
    question = {"type": "predicate", "instructions": "So?"}
    decided = [
        prompts_of(joining, "/v1/decisions", {"input": given, "questions": [question]})
        for given in (items()[1:], [{"role": "user", "content": "One,\ntwo?"}])
    ]
    assert decided[0] == decided[1] and all("So?" in prompt for prompt in decided[0])


def test_so_are_they_in_python(joining: Served) -> None:
    messages = tuple(message_from_object(each, "messages") for each in CHAT)
    encode = joining.front.intake.prompts.encode
    encoded = asyncio.run(encode(GenerationRequest(Chat(messages)), 4096))
    assert TOKENIZER.decode(encoded.tokens) == BEGUN


def test_a_mark_on_a_joined_block_keeps_the_prompt_up_to_there(joining: Served) -> None:
    prompts_of(joining, "/v1/messages", CASES["messages"][1])
    (sent,) = joining.submitted
    kept = [TOKENIZER.decode(sent.tokens[:at]) for at, _ in sent.caching.breakpoints]
    assert kept == [BEGUN[: BEGUN.index(end) + len(end)] for end in ("Very.", "One,")]


@pytest.mark.parametrize(
    ("path", "name", "part"),
    [
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": URL}}),
        ("/v1/chat/completions", "messages", {"type": "video", "video": [URL, URL]}),
        (
            "/v1/messages",
            "messages",
            {
                "type": "image",
                "source": {
                    "type": "base64",
                    "media_type": "image/png",
                    "data": URL.partition(",")[2],
                },
            },
        ),
        ("/v1/responses", "input", {"type": "input_image", "image_url": URL}),
    ],
)
def test_an_image_is_refused_by_its_place(
    joining: Served, path: str, name: str, part: dict[str, Any]
) -> None:
    say = text("What is it?", "input_text" if name == "input" else "text")
    body = {"model": "demo", "max_tokens": 5, name: [{"role": "user", "content": [say, part]}]}
    if name == "input":
        del body["max_tokens"]
    answer = joining.http.post(path, json=body)
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert told.startswith(f"{name}[0].content[1]: ") and "--chat-template" in told
