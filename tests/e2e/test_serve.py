"""The whole product: a real server process on real checkpoints' files, asked by the `openai`
SDK.
"""

from __future__ import annotations

import base64
import io
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import psutil
import pytest
from PIL import Image
from tokenizers import Tokenizer

from tests.checkpoints import (
    FAMILIES,
    Reference,
    make_checkpoint,
    picture,
    reference,
)
from tests.combinations import combinations
from tests.e2e.server import Server, serving

NEW_TOKENS = 32
PAGE = 16
"""Tokens of a page of the KV cache, which is found whole or not at all."""


def png(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def image_part(pixels: np.ndarray) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": png(pixels)}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        "--dtype",
        "float32",
        "--served-model-name",
        "tiny",
        "--max-total-tokens",
        "8192",
        "--max-running-requests",
        "16",
    )
    with serving(folder, tmp_path_factory.mktemp("log"), *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    body = {"ignore_eos": True, **options.pop("extra_body", {})}
    settings = {"max_tokens": NEW_TOKENS, "temperature": 0, **options}
    create: Any = client.chat.completions.create
    return create(model="tiny", messages=messages, extra_body=body, **settings)


def reference_text(
    folder: Path,
    judge: Reference,
    messages: Sequence[dict[str, Any]],
    pictures: Sequence[np.ndarray],
) -> str:
    """transformers' own answer: its template rendering, its tokenizer's file, its pixels, its
    generate.
    """
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    plain = [
        {
            **message,
            "content": [
                {"type": "image"} if p["type"] == "image_url" else p for p in message["content"]
            ],
        }
        for message in messages
    ]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    prompt = tokenizer.apply_chat_template(
        plain, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pixels = [judge.resize(each) for each in pictures]
    tokens = backend.encode(judge.expand(str(prompt), pixels)).ids
    generation = judge.model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    return str(backend.decode(judge.generate(tokens, pixels, max_new_tokens=NEW_TOKENS)))


@pytest.mark.parametrize(
    # Of each family the engine's answers are compared by default, in tests/engine/test_parity.py.
    "family",
    combinations((*FAMILIES, "internvl"), default=[("qwen3_vl",)]),
)
def test_answers_over_http_are_those_of_transformers(family: Any, tmp_path: Path) -> None:
    """Text, one picture, three of different sizes, and a chat of three turns; then all at once, in
    a small page pool.
    """
    folder = make_checkpoint(tmp_path / family, family)
    judge = reference(folder)
    a, b, c = picture(64, 90, seed=1), picture(130, 77, seed=2), picture(400, 300, seed=3)
    chats: list[tuple[list[dict[str, Any]], list[np.ndarray]]] = [
        ([user(text_part("how many red circles are there?"))], []),
        ([user(image_part(a), text_part("what?"))], [a]),
        (
            [
                user(
                    text_part("one "),
                    image_part(a),
                    text_part(" two "),
                    image_part(b),
                    text_part(" three "),
                    image_part(c),
                )
            ],
            [a, b, c],
        ),
    ]
    turns: list[dict[str, Any]] = []
    with serving(
        folder,
        tmp_path,
        "--dtype",
        "float32",
        "--served-model-name",
        "tiny",
        "--chunked-prefill-size",
        "64",
    ) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for index, each in enumerate((a, b, c)):
            turns.append(user(image_part(each), text_part(f"turn {index}")))
            answer = ask(client, turns).choices[0].message.content
            assert answer == reference_text(folder, judge, turns, [a, b, c][: index + 1])
            turns.append({"role": "assistant", "content": [text_part(answer)]})
        wanted = [reference_text(folder, judge, *chat) for chat in chats]
        for chat, want in zip(chats, wanted):
            assert ask(client, chat[0]).choices[0].message.content == want
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda chat: ask(client, chat[0]).choices[0].message.content, chats * 3)
            )
        assert answers == wanted * 3
        assert server.metric("saccade_images_encoded_total") == 3
        assert server.metric("saccade_images_decoded_total") == 3


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    messages = [user(image_part(picture(70, 70, seed=5)), text_part("describe"))]
    whole = ask(client, messages)
    chunks = list(ask(client, messages, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == NEW_TOKENS
    finishes = [
        choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ]
    assert finishes == ["length"]


def test_another_picture_of_equal_size_gets_its_own_answer(client: openai.OpenAI) -> None:
    def about(seed: int) -> str:
        return str(
            ask(client, [user(image_part(picture(96, 96, seed=seed)), text_part("what is it?"))])
            .choices[0]
            .message.content
        )

    first, second, again = about(201), about(202), about(201)
    assert first == again != second


def test_n_answers_logprobs_and_stop(client: openai.OpenAI) -> None:
    messages = [user(text_part("quick brown"))]
    answers = ask(client, messages, n=3, temperature=1.0, seed=7, logprobs=True, top_logprobs=2)
    again = ask(client, messages, n=3, temperature=1.0, seed=7)
    texts = [choice.message.content for choice in answers.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    entries = answers.choices[0].logprobs.content
    assert len(entries) == NEW_TOKENS
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)
    whole = ask(client, messages).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    stopped = ask(client, messages, stop=[stop])
    assert stopped.choices[0].message.content == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["the quick", "brown fox"], max_tokens=5, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 10


def test_bad_pictures_are_refused_by_name_and_harm_nobody(client: openai.OpenAI) -> None:
    for url, word in (
        ("data:image/png;base64,AAAA", "format"),
        ("data:text/html;base64,PGh0bWw+PC9odG1sPg==", "HTML"),
        ("http://127.0.0.1:1/x.png", "private"),
        ("ftp://x/y", "URL"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, [user(text_part("x"), {"type": "image_url", "image_url": {"url": url}})])
        body: Any = caught.value.body
        assert body["param"].startswith("messages[0].content[1]")
        assert word in body["message"]
    assert ask(client, [user(text_part("still there?"))]).choices[0].message.content


def test_five_hundred_random_requests_each_end_once_and_leave_no_page_behind(
    server: Server, client: openai.OpenAI
) -> None:
    rng = random.Random(0)
    pictures = [
        image_part(picture(rng.choice([40, 64, 96]), rng.choice([64, 100, 128]), seed=300 + i))
        for i in range(12)
    ]
    outcomes: list[str] = []
    lock = threading.Lock()

    def one(seed: int) -> None:
        draw = random.Random(seed)
        parts = [draw.choice(pictures) for _ in range(draw.choice([0, 0, 1, 1, 2, 4]))]
        messages = [user(*parts, text_part(draw.choice(["quick", "how many?", "brown fox " * 20])))]
        options: dict[str, Any] = {
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice([0, 1.0]),
            "seed": seed,
        }
        options["extra_body"] = {
            "ignore_eos": draw.random() < 0.7,
            "cache_salt": draw.choice(["", "", "tenant"]),
        }
        kind = draw.random()
        try:
            if kind < 0.15:  # a client that leaves in the middle
                with ask(client, messages, stream=True, **options) as stream:
                    for _ in zip(range(draw.randint(1, 3)), stream):
                        pass
                result = "left"
            elif kind < 0.25:
                ask(
                    client,
                    [
                        user(
                            *parts,
                            {
                                "type": "image_url",
                                "image_url": {"url": "data:image/png;base64,aGVsbG8="},
                            },
                        )
                    ],
                    **options,
                )
                result = "bad picture accepted"
            else:
                answer = ask(client, messages, n=draw.choice([1, 1, 2]), **options)
                result = ",".join(sorted({choice.finish_reason for choice in answer.choices}))
        except openai.BadRequestError:
            result = "refused"
        with lock:
            outcomes.append(result)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(500)))
    assert len(outcomes) == 500
    assert set(outcomes) <= {"left", "refused", "length", "stop", "length,stop"}
    assert outcomes.count("refused") > 20
    server.wait_for_metric("saccade_requests_in_flight", 0)
    server.wait_for_metric("saccade_requests_running", 0)
    server.wait_for_metric("saccade_requests_waiting", 0)
    server.wait_for_metric("saccade_kv_pages", 0, owner="sequences")
    server.wait_for_metric("saccade_arena_bytes_in_use", 0)


def test_a_client_that_goes_away_frees_its_request(server: Server) -> None:
    body = {
        "model": "tiny",
        "messages": [user(text_part("go on"))],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=30
    ) as response:
        stream = response.iter_bytes()
        next(stream)
        server.wait_for_metric("saccade_requests_running", 1)
    server.wait_for_metric("saccade_requests_running", 0)
    server.wait_for_metric("saccade_kv_pages", 0, owner="sequences")


def test_the_second_turn_of_a_response_decodes_and_encodes_nothing(
    server: Server, client: openai.OpenAI
) -> None:
    work = ("saccade_images_decoded_total", "saccade_images_encoded_total")
    before = [server.metric(name) for name in work]
    seen = picture(96, 128, seed=77)
    part = {"type": "input_image", "image_url": png(seen)}
    question: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}]
    settings: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
    create: Any = client.responses.create
    last = create(input=question, **settings)
    assert [server.metric(name) for name in work] == [count + 1 for count in before]
    prompts = [last.usage.input_tokens]
    for turn in range(3):
        last = create(input=f"And {turn}?", previous_response_id=last.id, **settings)
        assert last.usage.input_tokens_details.cached_tokens >= prompts[-1] - PAGE
        prompts.append(last.usage.input_tokens)
    assert [server.metric(name) for name in work] == [count + 1 for count in before]
    by_hand = create(input=list(conversation(client, last.id)), **settings)
    assert by_hand.output_text == last.output_text


def conversation(client: openai.OpenAI, response_id: str) -> Iterator[dict[str, Any]]:
    """All that a response was made of, as the API has it."""
    for item in client.responses.input_items.list(response_id, order="asc"):
        yield item.to_dict()


@pytest.mark.parametrize(
    "options",
    [
        ("--mm-attention-backend", "flash", "--device", "cpu"),  # refused by the server
        (
            "--all-reduce",
            "nccl",
            "--device",
            "cpu",
        ),  # refused by the engine, which alone sees the devices
    ],
)
def test_a_start_up_error_is_one_line(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "saccade", "serve", "demo", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"error: {options[0]} {options[1]}.*\n", done.stderr)


def test_a_stop_signal_lets_running_requests_finish_and_leaves_no_process(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path, "--dtype", "float32", "--served-model-name", "tiny") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        children = psutil.Process(server.process.pid).children(recursive=True)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, client, [user(text_part("go on"))], max_tokens=1500)
            server.wait_for_metric("saccade_requests_running", 1)
            server.process.terminate()
            assert len(running.result(timeout=30).choices[0].message.content) > 0
        assert server.process.wait(30) == 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive


def test_forced_calls_through_the_sdks_stream_with_images_in_results(server: Server) -> None:
    """A random model calls as it must; each call goes back with an image as its result."""
    look: Any = {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"where": {"enum": ["left", "right"]}},
                "required": ["where"],
                "additionalProperties": False,
            },
        },
    }
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [user(image_part(picture(64, 96)), text_part("what?"))]
    encoded = server.metric("saccade_images_encoded_total")
    for turn in range(3):
        with client.chat.completions.stream(
            model=client.models.list().data[0].id,
            messages=messages,
            tools=[look],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.0,
            seed=turn,
        ) as stream:
            deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
            answer = stream.get_final_completion()
        message = answer.choices[0].message
        assert message.tool_calls is not None and len(message.tool_calls) == 1
        call = message.tool_calls[0]
        assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
        assert call.function.parsed_arguments["where"] in ("left", "right")  # type: ignore[index]
        assert "".join(each.arguments_delta for each in deltas) == call.function.arguments
        result = [image_part(picture(64, 96, seed=50 + turn))]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    # Three prompts with one, two and three images: each was encoded once.
    assert server.metric("saccade_images_encoded_total") - encoded <= 3


# ---- Anthropic's API


def screenshot(seed: int) -> dict[str, Any]:
    data = png(picture(64, 64, 500 + seed)).partition(",")[2]
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }


def transcript(turns: int) -> dict[str, Any]:
    """What a coding assistant sends: a marked system list, and calls whose results are screens."""
    mark = {"type": "ephemeral"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Open the settings."}]
    for turn in range(turns):
        use = {"type": "tool_use", "id": f"t{turn}", "name": "click", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": [screenshot(turn)]}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    messages[-1]["content"][0]["cache_control"] = mark
    system = [
        {"type": "text", "text": "You use a computer."},
        {"type": "text", "text": "Be careful. " * 5, "cache_control": mark},
    ]
    where = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"name": "click", "description": "Click there.", "input_schema": where}
    return {"model": "tiny", "system": system, "messages": messages, "tools": [tool]}


def in_all(usage: anthropic.types.Usage) -> int:
    """Prompt tokens: found in the cache, computed and now kept by a mark, and others."""
    kept = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + kept


def test_an_agents_second_turn_costs_what_is_new(server: Server) -> None:
    """Thirty screens: none is decoded or encoded again, and the pages of the prompt are found."""

    def spent() -> tuple[float, float]:
        names = ("saccade_images_decoded_total", "saccade_images_encoded_total")
        return server.metric(names[0]), server.metric(names[1])

    with anthropic.Anthropic(api_key="x", base_url=server.url, max_retries=0) as client:
        create: Any = client.messages.create
        count: Any = client.messages.count_tokens
        before, asked = spent(), transcript(30)
        counted = count(**asked).input_tokens
        assert spent() == before
        first = create(**asked, max_tokens=8)
        decoded, encoded = spent()
        assert (decoded - before[0], encoded - before[1]) == (30, 30)
        assert in_all(first.usage) == counted
        asked["messages"] += [
            {"role": "assistant", "content": first.content or "Done."},
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        ]
        with client.messages.stream(**asked, max_tokens=8) as stream:
            second = stream.get_final_message()
        assert spent() == (decoded, encoded)
        recounted = count(**asked).input_tokens
    usage = second.usage
    assert recounted == in_all(usage)
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_read_input_tokens >= counted - 2 * 16  # but for a page that is not whole
