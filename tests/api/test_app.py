"""The API as its clients see it: through the real openai SDK and plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from saccade.core.client import Client
from saccade.core.metrics import DECLARED
from saccade.edge.metrics_text import LORA_INFO
from tests.helpers.echo import CACHED, CONTEXT
from tests.helpers.images import data_url, png
from tests.helpers.served import TOKENIZER, Served, its_own

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def picture(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def prompt_tokens(served: Served) -> int:
    return len(served.submitted[-1].tokens)


# ---- chat


@pytest.mark.parametrize(
    ("path", "body", "ending"),
    [
        ("/v1/chat/completions", {"messages": HI}, '"finish_reason":"length"'),
        ("/v1/responses", {"input": "Hi"}, '"reason":"max_output_tokens"'),
    ],
)
def test_a_model_that_does_not_end_is_ended_where_no_limit_is_named(
    served: Served, path: str, body: dict[str, Any], ending: str
) -> None:
    served.engine.reply = lambda request: TOKENIZER.encode("a " * 2000)
    answer = served.http.post(path, json=body)
    assert ending in answer.text and 'tokens":256' in answer.text


def test_a_chat_completion_parses_with_the_sdk(served: Served) -> None:
    answer = served.openai.chat.completions.create(model="demo", messages=HI)
    assert (
        answer.object == "chat.completion"
        and answer.id.startswith("chatcmpl-")
        and answer.model == "demo"
    )
    choice = answer.choices[0]
    assert (choice.index, choice.message.role, choice.message.content, choice.finish_reason) == (
        0,
        "assistant",
        "Hello!",
        "stop",
    )
    assert choice.logprobs is None
    count = len(TOKENIZER.encode("Hello!")) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        prompt_tokens(served),
        count,
    )
    assert answer.usage.total_tokens == prompt_tokens(served) + count
    assert answer.usage.prompt_tokens_details.cached_tokens == CACHED


def test_the_prompt_is_the_templates(served: Served) -> None:
    served.openai.chat.completions.create(
        model="demo", messages=[{"role": "developer", "content": "Be brief."}, *HI]
    )
    text = (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert served.submitted[0].tokens == tuple(TOKENIZER.encode(text))


def test_a_stream_opens_with_the_role_and_ends_with_the_finish_and_usage(served: Served) -> None:
    options = {"include_usage": True}
    chunks = list(
        served.openai.chat.completions.create(
            model="demo", messages=HI, stream=True, stream_options=options
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len(
        {chunk.id for chunk in chunks}
    ) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello!"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 2
    ) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (
        chunks[-1].choices == []
        and chunks[-1].usage.completion_tokens == len(TOKENIZER.encode("Hello!")) + 1
    )


def test_a_stream_without_usage_has_none_and_ends_with_done(served: Served) -> None:
    with served.http.stream(
        "POST", "/v1/chat/completions", json={"model": "demo", "messages": HI, "stream": True}
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_half_characters_never_reach_a_stream(served: Served) -> None:
    text = "né 中文 👍🏽!"
    served.says(text)
    chunks = list(served.openai.chat.completions.create(model="demo", messages=HI, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == text
    assert "中" in pieces and "文" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_an_answer_that_ends_inside_a_character_says_so(served: Served) -> None:
    served.says("中")
    answer = served.openai.chat.completions.create(model="demo", messages=HI, max_tokens=2)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        "\ufffd",
        "length",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_ends_the_answer_and_the_engine_hears_of_it(
    served: Served, stream: bool
) -> None:
    served.says("one two three four")
    answer = served.openai.chat.completions.create(
        model="demo", messages=HI, stop=["o th", "zzz"], stream=stream
    )
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish) == ("one tw", "stop")
    assert served.engine.aborted == [served.submitted[0].id]


def test_a_stop_token_ends_the_answer_and_is_not_shown(served: Served) -> None:
    served.says("Hello!")
    last = TOKENIZER.encode("Hello!")[-1]
    answer = served.openai.chat.completions.create(
        model="demo", messages=HI, extra_body={"stop_token_ids": [last]}
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "stop")


def test_stop_strings_do_not_count_before_min_tokens(served: Served) -> None:
    served.says("a b a b")
    answer = served.openai.chat.completions.create(
        model="demo", messages=HI, stop="b", extra_body={"min_tokens": 4}
    )
    assert answer.choices[0].message.content == "a b a "


def test_n_answers_count_up_their_seeds_and_the_prompt_counts_once(served: Served) -> None:
    served.engine.reply = lambda request: TOKENIZER.encode(str(request.sampling.seed))
    answer = served.openai.chat.completions.create(model="demo", messages=HI, n=3, seed=41)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, "41"),
        (1, "42"),
        (2, "43"),
    ]
    assert (
        answer.usage.prompt_tokens == prompt_tokens(served) and answer.usage.completion_tokens == 9
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == CACHED


def test_a_stream_of_n_answers_keeps_them_apart(served: Served) -> None:
    served.engine.reply = lambda request: TOKENIZER.encode(str(request.sampling.seed))
    texts, finishes = ["", ""], {}
    for chunk in served.openai.chat.completions.create(
        model="demo", messages=HI, n=2, seed=7, stream=True
    ):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finishes[choice.index] = choice.finish_reason
    assert texts == ["7", "8"] and finishes == {0: "stop", 1: "stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_openais_shape(served: Served, stream: bool) -> None:
    served.says("中")
    answer = served.openai.chat.completions.create(
        model="demo", messages=HI, logprobs=True, top_logprobs=2, stream=stream
    )
    if stream:
        entries = [
            entry
            for chunk in answer
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
    else:
        entries = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in entries] == [[0xE4], [0xB8], [0xAD], list(b"<|im_end|>")]
    assert entries[-1].token == "<|im_end|>"
    assert all(
        entry.logprob == -0.5 and [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5]
        for entry in entries
    )


def test_what_is_not_set_comes_from_the_checkpoint_and_what_is_set_arrives(served: Served) -> None:
    client = served.openai
    client.chat.completions.create(model="demo", messages=HI)
    plain = served.submitted[0]
    assert (
        plain.sampling.temperature == 0.0
    )  # the demo model's generation_config.json says do_sample: false
    assert plain.sampling.max_tokens == 256  # and max_new_tokens
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 1,
        "ignore_eos": True,
        "cache_salt": "me",
    }
    client.chat.completions.create(
        model="demo",
        messages=HI,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        max_completion_tokens=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100},
        stop="x",
        user="u",
        extra_body=extra,
    )
    request = served.submitted[1]
    s = request.sampling
    assert (s.temperature, s.top_p, s.seed, s.max_tokens, s.stop, s.ignore_eos) == (
        0.5,
        0.9,
        2**63 - 1,
        3,
        ("x",),
        True,
    )
    assert (s.top_k, s.min_p, s.repetition_penalty, s.min_tokens) == (5, 0.1, 1.2, 1)
    assert (s.presence_penalty, s.frequency_penalty, s.logit_bias, request.cache_salt) == (
        0.5,
        -0.5,
        ((7, -100.0),),
        Client().salt("me"),
    )


def test_a_salt_is_bounded(served: Served) -> None:
    body = {"model": "demo", "messages": HI, "cache_salt": "s" * 257}
    response = served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "cache_salt"
    assert len(response.content) < 300 and served.submitted == []


def test_a_conversation_with_tools_comes_back_as_the_sdk_wrote_it(served: Served) -> None:
    client = served.openai
    answer = client.chat.completions.create(model="demo", messages=HI)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        *HI,
        answer.choices[0].message,
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    history.append(
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "ok"}]}
    )
    cases: tuple[dict[str, Any], ...] = (
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": []},
        {"tools": None},
    )
    for tools in cases:
        again = client.chat.completions.create(model="demo", messages=history, **tools)
        assert again.choices[0].message.content == "Hello!"


def test_tools_that_would_never_be_called_are_refused_in_a_sentence(served: Served) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        error = refused(served, tools=[TOOL], **choice)
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert 'tool_choice "none"' in error["message"]


# ---- pictures


def test_pictures_become_spans_and_their_pixels_reach_the_engine(served: Served) -> None:
    content = [
        picture(data_url(png("red"))),
        {"type": "text", "text": "or"},
        picture(data_url(png("blue", (96, 64))), detail="low"),
    ]
    served.openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": content}]
    )
    request = served.submitted[0]
    assert [image.grid for image in request.images] == [(1, 4, 4), (1, 4, 6)]
    assert [(span.length, span.image) for span in request.spans] == [(4, 0), (6, 1)]
    assert served.front.metrics.value("saccade_arena_bytes_in_use") <= 16 << 20


def test_a_picture_that_cannot_be_opened_is_named_by_its_place(served: Served) -> None:
    content = [{"type": "text", "text": "x"}, picture("data:image/png;base64,AAAA")]
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.chat.completions.create(
            model="demo", messages=[*HI, {"role": "user", "content": content}]
        )
    assert caught.value.param == "messages[1].content[1]" and caught.value.code == "invalid_image"
    assert served.submitted == []


def test_a_picture_that_cannot_be_decoded_ends_the_request_with_its_place(served: Served) -> None:
    whole = png("green", (640, 640))
    damaged = data_url(whole[: len(whole) // 2])
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": [picture(damaged)]}]
        )
    assert caught.value.param == "messages[0].content[0]"
    assert (
        served.openai.chat.completions.create(model="demo", messages=HI).choices[0].message.content
        == "Hello!"
    )


# ---- completions


def test_text_completions_take_texts_and_tokens_one_or_many(served: Served) -> None:
    served.engine.reply = lambda request: TOKENIZER.encode(str(len(request.tokens)))
    client = served.openai
    for prompt, lengths in [
        ("ab", [2]),
        (["ab", "abc"], [2, 3]),
        ([10, 11, 12, 13], [4]),
        ([[10], [11, 12]], [1, 2]),
    ]:
        expected = lengths if isinstance(prompt, list) and not isinstance(prompt[0], str) else None
        served.engine.received.clear()
        answer = client.completions.create(model="demo", prompt=prompt)
        counts = [len(request.tokens) for request in served.submitted]
        assert expected is None or counts == expected
        assert [(choice.index, choice.text) for choice in answer.choices] == [
            (i, str(count)) for i, count in enumerate(counts)
        ]
        assert answer.object == "text_completion" and answer.usage.prompt_tokens == sum(counts)
        assert served.submitted[0].sampling.max_tokens == 16


def test_a_text_stream_and_its_logprobs(served: Served) -> None:
    chunks = list(
        served.openai.completions.create(model="demo", prompt="ab", stream=True, logprobs=1)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello!"
    assert chunks[-1].choices[0].finish_reason == "stop"
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    assert "".join(tokens) == "Hello!<|im_end|>"
    assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]


# ---- refusals


def refused(served: Served, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    base = {"model": "demo", "messages": HI} if "chat" in path else {"model": "demo", "prompt": "x"}
    response = served.http.post(path, json={**base, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
    )
    assert served.submitted == []
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [480]}, "stop_token_ids"),
        ({"logit_bias": {"480": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "text"}, "guided_json": "{"}, "guided_json"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"guided_json": {"x": "y" * (1 << 20)}}, "guided_json"),
        (
            {"guided_json": {"properties": {"a": {"patternProperties": {}}}}},
            "guided_json.properties.a.patternProperties",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"store": True}, "store"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [picture("data:,", zoom=2)]}]},
            "messages[0].content[0].image_url.zoom",
        ),
        (
            {"messages": [{"role": "user", "content": [picture("data:,", detail="huge")]}]},
            "messages[0].content[0].image_url.detail",
        ),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "messages": [{"role": "user", "content": []}]},
            "continue_final_message",
        ),
    ],
)
def test_what_is_wrong_or_unsupported_is_a_400_that_names_it(
    served: Served, body: dict[str, Any], param: str | None
) -> None:
    error = refused(served, **body)
    assert param is None or error["param"] == param
    assert param is None or param.partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [480]}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
        ({"messages": HI}, "messages"),
    ],
)
def test_text_completions_refuse_as_precisely(
    served: Served, body: dict[str, Any], param: str
) -> None:
    assert refused(served, "/v1/completions", **body)["param"] == param


def test_an_unknown_parameter_is_called_unsupported(served: Served) -> None:
    assert refused(served, frobnicate=1)["code"] == "unknown_parameter"


def test_a_value_that_is_none_of_few_is_answered_with_those(served: Served) -> None:
    beam = refused(served, "/v1/completions", use_beam_search=True)
    assert (beam["message"], beam["param"], beam["code"]) == (
        "use_beam_search: only false is supported",
        "use_beam_search",
        "unsupported_parameter",
    )
    part = refused(served, messages=[*HI, {"role": "user", "content": [{"type": "hologram"}]}])
    assert (
        part["message"]
        == 'messages[1].content[0].type: only "video_url", "video", "input_video", "text", '
        '"refusal", "image_url", "image_file", "file", "image", "input_text" or "input_image" is '
        "supported"
    )
    assert part["param"] == "messages[1].content[0].type" and part["code"] == "invalid_value"


def test_a_prompt_beyond_the_context_is_refused_with_both_figures_before_any_decoding(
    served: Served,
) -> None:
    before = served.front.metrics.value("saccade_images_decoded_total")
    error = refused(
        served, messages=[{"role": "user", "content": [picture(data_url(png("red", (900, 900))))]}]
    )
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert str(CONTEXT) in error["message"] and "799" in error["message"]
    assert served.front.metrics.value("saccade_images_decoded_total") == before


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 100_000, b'"text"', b'{"model": "demo"}']
)
def test_a_body_that_is_no_request_is_a_400(served: Served, body: bytes) -> None:
    response = served.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_another_content_type_is_refused(served: Served) -> None:
    response = served.http.post("/v1/chat/completions", data={"model": "demo"})
    assert (
        response.status_code == 400
        and "application/x-www-form-urlencoded" in response.json()["error"]["message"]
    )


# ---- the other paths


def test_models_are_listed_by_their_served_names(served: Served) -> None:
    client = served.openai
    assert [model.id for model in client.models.list()] == ["demo", "other"]
    assert client.models.retrieve("other").id == "other"
    for call in (
        lambda: client.models.retrieve("gpt"),
        lambda: client.chat.completions.create(model="gpt", messages=HI),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found"


def test_what_is_not_there_is_a_404_or_405_in_openais_shape(served: Served) -> None:
    missing, wrong = served.http.get("/v1/nothing"), served.http.get("/v1/chat/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert (
        missing.json()["error"]["code"] == "not_found"
        and wrong.json()["error"]["code"] == "method_not_allowed"
    )
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"].endswith("on /v1/chat/completions: use POST")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("POST", "/v1/files/file-1", "DELETE, GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("GET", "/v1/messages", "POST"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_a_405_names_every_method_of_the_path(
    served: Served, method: str, path: str, allow: str
) -> None:
    answer = served.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    used = " or ".join(each for each in allow.split(", ") if each != "HEAD")
    assert answer.json()["error"]["message"] == f"{method} is not allowed on {path}: use {used}"


@its_own
def test_health_version_and_cors_by_default(served: Served) -> None:
    response = served.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ready", "model": "demo"})
    assert "access-control-allow-origin" not in response.headers
    assert served.http.get("/version").json()["version"]


@its_own
def test_metrics_count_requests_by_outcome_and_time_them(served: Served) -> None:
    def read() -> dict[str, float]:
        lines = served.http.get("/metrics").text.splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if not line.startswith("#")
        }

    before = read()
    served.openai.chat.completions.create(model="demo", messages=HI)
    served.openai.chat.completions.create(model="demo", messages=HI, max_tokens=1)
    after = read()
    for outcome in ("stop", "length"):
        name = f'saccade_requests_total{{outcome="{outcome}"}}'
        assert after[name] == before.get(name, 0) + 1
    assert after["saccade_ttft_seconds_count"] == before["saccade_ttft_seconds_count"] + 2
    assert after["saccade_e2e_seconds_count"] == before["saccade_e2e_seconds_count"] + 2
    assert after["saccade_itl_seconds_count"] == before["saccade_itl_seconds_count"] + len(
        TOKENIZER.encode("Hello!")
    )
    assert after["saccade_requests_in_flight"] == 0


@its_own
def test_metrics_are_prometheus_text_with_every_declared_name(served: Served) -> None:
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {
        family.name: family.type
        for family in text_string_to_metric_families(response.text)
        if not family.name.startswith("process_")  # prometheus_client's own
    }
    assert families == {
        name.removesuffix("_total"): metric.kind
        for metric in DECLARED
        for name in (metric.name, metric.old_name)
        if name
    } | {LORA_INFO: "gauge"}
    assert {
        f'saccade_image_hits_total{{level="{level}"}}' for level in ("kv", "embedding", "pixels")
    } <= {line.rpartition(" ")[0] for line in response.text.splitlines()}


def test_a_large_body_is_no_problem(served: Served) -> None:
    answer = served.openai.chat.completions.create(model="demo", messages=HI, user="x" * 35_000_000)
    assert answer.choices[0].message.content == "Hello!"


def test_the_server_speaks_plain_http(served: Served) -> None:
    assert (
        httpx.post(
            f"{served.address}/v1/completions", json={"model": "demo", "prompt": "x"}
        ).json()["choices"][0]["text"]
        == "Hello!"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_becomes_too_complex_is_the_requests_own_fault(
    served: Served, stream: bool
) -> None:
    served.engine.fault = ("the grammar cannot be followed", "grammar_too_complex")
    body = {"messages": HI, "guided_regex": "[a-z]+", "stream": stream}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == (200 if stream else 400)
    assert '"grammar_too_complex"' in answer.text and '"invalid_request_error"' in answer.text


def test_a_request_carries_its_grammar_to_the_engine(served: Served) -> None:
    for prompt in ("a", "b"):
        body = {"prompt": prompt, "structured_outputs": {"choice": ["x", "y"]}, "n": 2}
        assert served.http.post("/v1/completions", json=body).status_code == 200
    requests = served.submitted
    assert len(requests) == 4 and len({request.grammar for request in requests}) == 1
    assert '"x" | "y"' in json.loads(requests[0].grammar)["grammars"][0]["lark_grammar"]


@pytest.mark.parametrize(
    ("more", "streamed"), [({}, False), ({"stream": True}, True), ({"stop": ["never"]}, True)]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_the_engine_hears_whether_somebody_reads_along(
    served: Served, path: str, more: dict[str, Any], streamed: bool
) -> None:
    """Where the front end may see the end first, it hears of each token."""
    if path == "/v1/messages" and "stop" in more:
        more = {"stop_sequences": more["stop"]}
    body = {"model": "demo", "messages": HI, "max_tokens": 5, **more}
    assert served.http.post(path, json=body).status_code == 200
    assert served.submitted[-1].streamed is streamed
