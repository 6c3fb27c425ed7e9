"""What existing clients send without meaning anything by it is no error; what would change the
answer is, by name.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import openai
import pytest

from saccade.core.errors import InvalidRequest
from saccade.plugins.messages.read import _MESSAGE
from saccade.plugins.responses.items import read_items
from saccade.text.prompt.template import ChatTemplate
from tests.helpers.images import data_url, png
from tests.helpers.served import TOKENIZER, Served

HI = [{"role": "user", "content": "Hi"}]


def post(served: Served, path: str = "/v1/chat/completions", **body: Any) -> Any:
    base = {"messages": HI} if "chat" in path else {"prompt": "x"}
    return served.http.post(path, json={"model": "demo", **base, **body})


@pytest.mark.parametrize(
    "name",
    [
        "frobnicate",
        "reasoning_effort",
        "verbosity",
        "prediction",
        "web_search_options",
        "audio",
        "functions",
        "function_call",
        "prompt_cache_retention",
        "prompt_logprobs",
        "guided_json",
        "temperature",
        "n",
        "stop",
        "stream",
        "logit_bias",
        "tools",
        "response_format",
        "stream_options",
    ],
)
def test_null_is_absent_for_every_field(served: Served, name: str) -> None:
    unset: dict[str, Any] = {name: None}
    assert post(served, **unset).status_code == 200
    assert served.submitted[0].sampling.max_tokens > 16


def test_null_is_absent_within_fields_too(served: Served) -> None:
    url = data_url(png())
    image = {"url": url, "detail": None, "max_pixels": None, "zoom": None}
    part = {"type": "image_url", "image_url": image, "cache_control": None}
    message = {"role": "user", "content": [part], "name": None, "tool_calls": None}
    answer = post(
        served,
        messages=[message],
        stream=False,
        saccade={"trace": None, "other": None},
        mm_processor_kwargs={"max_pixels": None, "num_crops": None},
        chat_template_kwargs={"x": None},
    )
    assert answer.status_code == 200, answer.text


NEUTRAL = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "echo": False,
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "priority": 0,
    "bad_words": [],
    "parallel_tool_calls": False,
    "service_tier": "auto",
    "store": False,
    "user": "me",
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "request_id": "r1",
    "logits_processors": [],
    "return_tokens_as_token_ids": False,
    "suffix": "",
}


@pytest.mark.more
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_neutral_values_of_other_servers_fields_are_accepted(served: Served, path: str) -> None:
    for name, value in NEUTRAL.items():
        assert post(served, path, **{name: value}).status_code == 200, name
    special = "chat" not in path
    assert post(served, path, add_special_tokens=special).status_code == 200
    assert post(served, path, **NEUTRAL).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True),
        ("best_of", 2),
        ("best_of", True),
        ("length_penalty", 1.5),
        ("use_beam_search", True),
        ("store", True),
        ("service_tier", "cheap"),
        ("reasoning_effort", "huge"),
        ("web_search_options", {}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("add_special_tokens", True),
        ("structural_tag", {}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    served: Served, name: str, value: Any
) -> None:
    answer = post(served, **{name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == name and error["message"].startswith(f"{name}: ")
    assert served.submitted == []


def test_an_answer_of_the_sdks_stream_helper_is_sent_back(served: Served) -> None:
    client = served.openai
    with client.chat.completions.stream(model="demo", messages=HI) as stream:
        message = stream.get_final_completion().choices[0].message
    for sent in (message, message.model_dump()):
        again = client.chat.completions.create(
            model="demo",
            messages=[*HI, sent, {"role": "user", "content": "And?"}],
        )
        assert again.choices[0].message.content == "Hello!"
    parsed = client.chat.completions.parse(model="demo", messages=HI).choices[0].message
    client.chat.completions.create(model="demo", messages=[*HI, parsed, *HI])


@pytest.mark.parametrize(
    "keys",
    [
        {"provider_specific_fields": {"refusal": None}, "function_call": None, "tool_calls": None},
        {"reasoning": "hm", "reasoning_details": [{"x": 1}], "thinking_blocks": []},
        {"id": "m1", "refusal": "", "parsed": {"a": 1}, "annotations": [], "audio": {"id": "x"}},
        {"cache_control": {"type": "ephemeral"}},
    ],
)
def test_unknown_keys_of_messages_and_parts_are_ignored(
    served: Served, keys: dict[str, Any]
) -> None:
    plain = {"role": "assistant", "content": "Hello!"}
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi", **keys}]}
    assert post(served, messages=[*HI, {**plain, **keys}, parts]).status_code == 200
    assert post(served, messages=[*HI, plain, *HI]).status_code == 200
    with_keys, without = served.submitted
    assert with_keys.tokens == without.tokens


QUESTION = {"type": "predicate", "instructions": "So?"}
SEEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "counted": ("/tokenize", {"messages": [{**HI[0], "files": ["x"]}]}, "messages[0].files"),
    "got ready": (
        "/v1/chat/completions",
        {"messages": [{**HI[0], "image": "x"}], "prompt_cache_options": {"prewarm": True}},
        "messages[0].image",
    ),
    "embedded": (
        "/v1/embeddings",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "size": 3}]}]},
        "messages[0].content[0].size",
    ),
    "embedded, Cohere's": (
        "/v2/embed",
        {"inputs": [{"content": [{"type": "text", "text": "Hi", "image": "x"}]}]},
        "inputs[0].content[0].image",
    ),
    "input decided about": (
        "/v1/decisions",
        {"input": [{**HI[0], "images": ["x"]}], "questions": [QUESTION]},
        "input[0].images",
    ),
    "question": (
        "/v1/decisions",
        {
            "input": "Hi",
            "questions": [{**QUESTION, "images": ["x"]}],
        },
        "questions[0].images",
    ),
    "counted, Anthropic's": (
        "/v1/messages/count_tokens",
        {"messages": HI, "system": [{"type": "text", "text": "Hi", "attachments": ["x"]}]},
        "system[0].attachments",
    ),
    "result of a tool": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": "x", "images": ["x"]}
                    ],
                }
            ],
        },
        "messages[0].content[0].images",
    ),
}


@pytest.mark.parametrize("case", SEEN)
def test_fields_that_would_change_what_is_seen_are_refused_wherever_messages_are_read(
    served: Served, case: str
) -> None:
    path, body, param = SEEN[case]
    answer = served.http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 400, answer.text
    assert f"{param}: this parameter is not supported" in answer.json()["error"]["message"]
    assert served.submitted == []


def test_an_image_of_ollamas_is_the_image_of_a_part(served: Served) -> None:
    picture = png("blue")
    beside = {"role": "user", "content": "What?", "images": [base64.b64encode(picture).decode()]}
    image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    part = {"role": "user", "content": [image, {"type": "text", "text": "What?"}]}
    for message in (beside, part):
        assert post(served, messages=[message]).status_code == 200
    first, again = served.submitted
    assert first.images == again.images and first.tokens == again.tokens


def test_whole_floats_are_integers(served: Served) -> None:
    body = '{"model":"demo","messages":[{"role":"user","content":"Hi"}],"max_tokens":8.0,'
    body += '"seed":42.0,"top_k":1e1,"n":1.0,"stop_token_ids":[7.0],"logit_bias":{"7":-1.0}}'
    headers = {"content-type": "application/json"}
    answer = served.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    sampling = served.submitted[0].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (8, 42, 10)
    assert sampling.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", "8"), ("temperature", "0.5"), ("stream", "true"), ("n", "1")],
)
def test_numbers_in_quotes_are_refused_clearly(served: Served, name: str, value: str) -> None:
    error = post(served, **{name: value}).json()["error"]
    assert error["param"] == name and error["message"].endswith("write it without quotes")


def test_usage_comes_with_every_chunk_when_asked(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        served.openai.chat.completions.create(
            model="demo",
            messages=HI,
            stream=True,
            stream_options=options,
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[0] == 1
    assert counts[-1] == len(TOKENIZER.encode("Hello!")) + 1


def test_a_prompt_beyond_the_context_is_told_in_the_words_that_clients_look_for(
    served: Served,
) -> None:
    for content in ("word " * 600, "x" * 100_000):
        with pytest.raises(openai.BadRequestError) as caught:
            served.openai.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": content}]
            )
        words = "This model's maximum context length is"
        assert caught.value.body["message"].startswith(f"{words} 512 tokens")  # type: ignore[index]
        assert words in str(caught.value), "LiteLLM looks for them in the error's repr"
        assert caught.value.code == "context_length_exceeded"


def image_sources() -> dict[str, dict[str, Any]]:
    data = next(d for n in range(64, 96) if len(d := png(size=(n, 64))) % 3)
    base = base64.b64encode(data).decode()
    url = "data:image/png;base64,"
    unpadded, safe = base.rstrip("="), base64.urlsafe_b64encode(data).decode()
    assert unpadded != base and safe != base
    return {
        "padded": {"type": "image_url", "image_url": {"url": url + base}},
        "bare string": {"type": "image_url", "image_url": url + base},
        "no padding": {"type": "image_url", "image_url": {"url": url + unpadded}},
        "URL-safe": {"type": "image_url", "image_url": {"url": url + safe}},
        "URL-safe, no padding": {"type": "image_url", "image_url": url + safe.rstrip("=")},
        "raw base64": {"type": "image_url", "image_url": {"url": base}},
        "raw base64, bare": {"type": "image_url", "image_url": base},
        "file data": {"type": "file", "file": {"filename": "a.png", "file_data": url + base}},
        "file data, raw": {"type": "file", "file": {"filename": "a.png", "file_data": base}},
        "input_image": {"type": "input_image", "image_url": url + base, "detail": "auto"},
        "image": {"type": "image", "image": url + base},
    }


def test_an_image_may_be_written_in_many_ways(served: Served) -> None:
    counts = set()
    for name, part in image_sources().items():
        content = [part, {"type": "input_text", "text": "what?"}]
        body = {"messages": [{"role": "user", "content": content}]}
        answer = served.http.post("/tokenize", json=body)
        assert answer.status_code == 200, (name, answer.text)
        counts.add((tuple(answer.json()["tokens"]), answer.json()["images"][0]["format"]))
    assert len(counts) == 1 and {format for _, format in counts} == {"PNG"}


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "file", "file": {"filename": "a.png"}}, "file.file_id"),
        ({"type": "file", "file": {"file_id": "a", "file_data": "b"}}, "file"),
        ({"type": "image_url", "image_url": {"url": "x", "zoom": 1}}, "image_url.zoom"),
        ({"type": "input_image"}, "file_id"),
    ],
)
def test_an_image_that_is_not_there_is_refused_at_its_place(
    served: Served, part: dict[str, Any], param: str
) -> None:
    answer = post(served, messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages[0].content[0].{param}"


def test_mm_processor_kwargs_bound_images_that_have_no_bounds_of_their_own(served: Served) -> None:
    url = data_url(png(size=(320, 320)))
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": url, "max_pixels": 256 * 256}},
    ]
    message = {"role": "user", "content": parts}
    body = {"messages": [message], "mm_processor_kwargs": {"max_pixels": 64 * 64}}
    counted = served.http.post("/tokenize", json=body).json()
    assert [image["tokens"] for image in counted["images"]] == [4, 64]
    edges = {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 64}}
    for same in (edges, {"images_kwargs": edges}, {"images_kwargs": {"max_pixels": 64 * 64}}):
        again = served.http.post("/tokenize", json={**body, "mm_processor_kwargs": same}).json()
        assert again["images"] == counted["images"]
    others: list[Any] = [{"size": {"height": 4}}, {"size": {"longest_edge": 99}, "max_pixels": 9}]
    for other in others:
        error = post(served, messages=[message], mm_processor_kwargs=other).json()["error"]
        assert error["param"].startswith("mm_processor_kwargs")
    refused = post(served, mm_processor_kwargs={"num_crops": 4})
    assert refused.json()["error"]["param"] == "mm_processor_kwargs.num_crops"


def test_half_of_a_surrogate_pair_is_told_as_such(served: Served) -> None:
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "\ud800"}]})
    answer = served.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and "half of a surrogate pair" in answer.text


def test_hints_are_for_templates_that_have_a_word_for_them(served: Served) -> None:
    before = served.front.intake.prompts.template
    source = "{{ verbosity }}{% for message in messages %}{{ message.content }}{% endfor %}"
    served.front.intake.prompts.template = ChatTemplate({"default": source}, {})
    try:
        assert post(served, verbosity="low").status_code == 200
        assert "low" in TOKENIZER.decode(served.submitted[0].tokens)
        own: dict[str, Any] = {"chat_template_kwargs": {"verbosity": "high"}}
        assert post(served, verbosity="low", **own).status_code == 200
        assert "high" in TOKENIZER.decode(served.submitted[1].tokens)
    finally:
        served.front.intake.prompts.template = before


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"verbosity": "low", "reasoning_effort": "high"}, ["verbosity", "reasoning_effort"]),
        ({"enable_thinking": True}, ["thinking"]),
        ({"enable_thinking": False}, None),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            ["thinking", "thinking_token_budget"],
        ),
        ({"reasoning": {"effort": "low", "exclude": True}}, ["reasoning_effort"]),
        ({"reasoning": {"enabled": True}}, ["thinking"]),
        ({"reasoning_effort": "none", "verbosity": "medium"}, None),
    ],
)
def test_switches_that_a_model_lacks_are_passed_over_and_told(
    served: Served, fields: dict[str, Any], ignored: list[str] | None
) -> None:
    answer = post(served, saccade={"trace": True}, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["saccade"].get("ignored") == ignored


def test_a_template_with_a_switch_for_thinking_gets_every_spelling_of_it(served: Served) -> None:
    before = served.front.intake.prompts.template
    source = "{{ enable_thinking }}{% for message in messages %}{{ message.content }}{% endfor %}"
    served.front.intake.prompts.template = ChatTemplate({"default": source}, {})
    spellings: list[dict[str, Any]] = [
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"thinking": False},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
    ]
    try:
        for fields in spellings:
            served.engine.received.clear()
            assert post(served, **fields).status_code == 200
            assert "False" in TOKENIZER.decode(served.submitted[0].tokens), fields
    finally:
        served.front.intake.prompts.template = before


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
        {"stop": ""},
        {"stop": [""]},
        {"stop": []},
        {"model": ""},
    ],
)
def test_what_empty_boxes_of_forms_send_is_as_if_left_out(
    served: Served, fields: dict[str, Any]
) -> None:
    assert post(served, **fields).status_code == 200
    sampling = served.submitted[0].sampling
    assert (sampling.max_tokens, sampling.stop) == (256, ())


@pytest.mark.parametrize(
    "fields", [{"max_tokens": -2}, {"max_tokens": -3}, {"max_completion_tokens": -2}]
)
def test_other_lengths_below_one_are_refused_by_name(
    served: Served, fields: dict[str, Any]
) -> None:
    answer = post(served, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


def test_an_answer_of_openais_that_refused_may_be_sent_back(served: Served) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot"}]}
    messages = [{"role": "user", "content": "Hi"}, refused, {"role": "user", "content": "Why?"}]
    assert post(served, messages=messages).status_code == 200
    assert "I cannot" in TOKENIZER.decode(served.submitted[0].tokens)


def test_spaces_around_a_url_are_none_of_it(served: Served) -> None:
    url = data_url(png(size=(64, 96)))
    for given in (url, f" \n{url}\n "):
        part = {"type": "image_url", "image_url": {"url": given}}
        assert post(served, messages=[{"role": "user", "content": [part]}]).status_code == 200
    first, again = served.submitted
    assert first.images[0].key == again.images[0].key


def test_what_is_heard_is_refused_by_that_word(served: Served) -> None:
    kind = "input_audio"
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "http://x.example/a"}}]
    error = post(served, messages=[{"role": "user", "content": parts}]).json()["error"]
    assert error["param"] == "messages[0].content[1].type" and "audio" in error["message"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "/v1 at its end"),
        ("/v1/v1/chat/completions", "/v1 twice"),
        ("/messages", "Anthropic"),
        ("/api/chat", "Ollama"),
        ("/api/generate", "Ollama"),
        ("/v1beta/models/gemini:generateContent", "Gemini"),
        ("/v1/models/gemini:generateContent", "Gemini"),
    ],
)
def test_a_path_of_another_base_url_says_what_that_should_be(
    served: Served, path: str, said: str
) -> None:
    answer = served.http.post(path, json={})
    assert answer.status_code in (404, 405)
    error = answer.json()["error"]
    assert (isinstance(error, str)) == path.startswith("/api/"), "Ollama's clients show a text"
    assert said in (error if isinstance(error, str) else error["message"])
    if path.startswith("/v1beta/"):
        assert (error["code"], error["status"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("below", ["", "/msgbatch_1", "/msgbatch_1/results", "/msgbatch_1/cancel"])
def test_batches_of_messages_are_refused_by_name(served: Served, method: str, below: str) -> None:
    answer = served.http.request(method, f"/v1/messages/batches{below}")
    assert answer.status_code == 404 and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "POST /v1/batches" in answer.json()["error"]["message"]


def test_what_only_might_save_time_is_accepted(served: Served) -> None:
    for fields in (
        {"prediction": {"type": "content", "content": "Hello!"}},
        {"service_tier": "flex"},
        {"modalities": ["text"]},
        {"reasoning_effort": "none", "verbosity": "medium"},
    ):
        assert post(served, **fields).status_code == 200, fields


def named(uuid: str, url: str | None = None) -> list[dict[str, Any]]:
    part: dict[str, Any] = {"type": "image_url", "image_url": url and {"url": url}, "uuid": uuid}
    return [{"role": "user", "content": [part, {"type": "text", "text": "see"}]}]


def test_an_image_comes_again_by_its_uuid_alone(served: Served) -> None:
    url = data_url(png(size=(64, 96)))
    assert post(served, messages=named("cat", url)).status_code == 200
    assert post(served, messages=named("cat")).status_code == 200
    first, again = served.submitted
    assert first.images == again.images and first.tokens == again.tokens
    by_input = [{"role": "user", "content": [{"type": "input_image", "uuid": "cat"}]}]
    assert served.http.post("/v1/responses", json={"input": by_input}).status_code == 200


def test_a_uuid_that_nothing_is_known_of_is_refused_by_name(served: Served) -> None:
    url = data_url(png(size=(96, 64)))
    assert post(served, messages=named("dog", url), cache_salt="a").status_code == 200
    other = post(served, messages=named("dog"), cache_salt="b")
    for answer in (post(served, messages=named("bird")), other):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "unknown_uuid"
        assert error["param"] == "messages[0].content[0]"


def test_an_image_of_a_uuid_that_is_not_cached_any_more_is_asked_for(served: Served) -> None:
    url = data_url(png(size=(96, 96)))
    assert post(served, messages=named("fox", url)).status_code == 200
    served.on_loop(served.engine._pixels.clear)  # as if it had been evicted
    answer = post(served, messages=named("fox"))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "unknown_uuid"
    assert error["param"] == "messages[0].content[0]" and "send it" in error["message"]
    served.on_loop(served.engine._pixels.clear)
    assert post(served, messages=named("fox", url)).status_code == 200


@pytest.mark.parametrize("kind", ["input_audio", "audio"])
@pytest.mark.parametrize("api", ["responses", "messages"])
def test_parts_that_sound_are_refused_by_name_in_every_dialect(api: str, kind: str) -> None:
    message = {"role": "user", "content": [{"type": kind, "url": "https://example.com/a"}]}
    raw = msgspec.Raw(msgspec.json.encode(message))
    with pytest.raises(InvalidRequest) as refused:
        _ = read_items(raw, "input[0]") if api == "responses" else _MESSAGE.json(raw, "input[0]")
    assert "audio is not supported" in str(refused.value)
    assert refused.value.param == "input[0].content[0].type"
