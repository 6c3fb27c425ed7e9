"""Every length has a bound that is looked at before the work: what is too long is a 400 that names
the field, and nobody else waits for it.
"""

from __future__ import annotations

import json
import threading
import tracemalloc
from typing import Any

import pytest
from msgspec import inspect

from saccade.api.body_schema import check_size
from saccade.api.chat import fields as bodies
from saccade.api.chat.read import read_completion
from saccade.core.errors import InvalidRequest
from saccade.core.types import MAX_BIASED_TOKENS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS
from saccade.front.content import ChatMessage
from saccade.front.fields import Reader
from tests.helpers.echo import CONTEXT
from tests.helpers.served import Served

HI = [{"role": "user", "content": "Hi"}]
DIGITS = "9" * 5000
PATHS = {"/v1/chat/completions": '"messages":[{"role":"user","content":"Hi"}]',
         "/v1/completions": '"prompt":"x"'}  # fmt: skip


def send(served: Served, path: str, body: str | bytes) -> Any:
    return served.http.post(path, content=body, headers={"content-type": "application/json"})


def refusal(served: Served, body: str, path: str = "/v1/chat/completions") -> dict[str, Any]:
    answer = send(served, path, body)
    assert answer.status_code == 400, answer.text[:500]
    assert not served.submitted
    error: dict[str, Any] = answer.json()["error"]
    assert len(answer.text) < 3000, "nothing is echoed at length"
    return error


def integer_types(kind: inspect.Type, path: str) -> list[tuple[str, inspect.IntType]]:
    match kind:
        case inspect.IntType():
            return [(path, kind)]
        case inspect.UnionType(types):
            return [found for each in types for found in integer_types(each, path)]
        case inspect.ListType(item):
            return integer_types(item, path + "[]")
        case inspect.DictType(key, value):
            return integer_types(key, path + "{}") + integer_types(value, path + "{}")
        case inspect.StructType(fields=fields):
            return [
                found
                for field in fields
                for found in integer_types(field.type, f"{path}.{field.encode_name}")
            ]
    return []


def test_every_integer_of_every_body_has_64_bits() -> None:
    forms = (bodies.CHAT, bodies.COMPLETION, bodies.TOKENIZE_TEXT, bodies.DETOKENIZE)
    kinds = [group for form in forms for group in form.groups] + [ChatMessage]
    found = [each for kind in kinds for each in integer_types(inspect.type_info(kind), str(kind))]
    assert len(found) > 15
    for path, kind in found:
        assert kind.ge is not None and kind.ge >= -(2**63), path
        assert kind.le is not None and kind.le < 2**63, path


@pytest.mark.parametrize("number", [DIGITS, str(2**64), str(2**63), "1e300", "-" + DIGITS])
@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("top_k", "{}"),
        ("max_tokens", "{}"),
        ("min_tokens", "{}"),
        ("seed", "{}"),
        ("n", "{}"),
        ("stop_token_ids", "[{}]"),
        ("logit_bias", '{{"{}":1}}'),
        ("top_logprobs", "{}"),
        ("max_completion_tokens", "{}"),
    ],
)
def test_integers_beyond_64_bits_are_refused_by_name(
    served: Served, name: str, template: str, number: str
) -> None:
    value = template.format(number)
    error = refusal(served, f'{{"messages":{json.dumps(HI)},"{name}":{value}}}')
    assert error["param"] is not None and error["param"].startswith(name)
    assert error["message"].startswith(name)


@pytest.mark.first
@pytest.mark.parametrize("number", [DIGITS, "1" + "0" * 400, "1e999"])
def test_other_numbers_of_any_length_are_refused_by_name(served: Served, number: str) -> None:
    for name, value in (
        ("temperature", number),
        ("chat_template_kwargs", f'{{"x":{DIGITS}}}'),
        ("mm_processor_kwargs", f'{{"max_pixels":{number}}}'),
        ("logprobs", number),
    ):
        error = refusal(served, f'{{"messages":{json.dumps(HI)},"{name}":{value}}}')
        assert error["param"].startswith(name), (name, error)
    part = f'{{"type":"image_url","image_url":{{"url":"data:,","max_pixels":{DIGITS}}}}}'
    error = refusal(served, f'{{"messages":[{{"role":"user","content":[{part}]}}]}}')
    assert error["param"] == "messages[0].content[0].image_url.max_pixels"
    for prompt in (f"[{DIGITS}]", f"[[{DIGITS}]]", f"[{2**64}]"):
        assert refusal(served, f'{{"prompt":{prompt}}}', "/v1/completions")["param"].startswith(
            "prompt"
        )


LONG: dict[str, tuple[Any, str]] = {
    "stop": (["a" * (MAX_STOP_CHARACTERS + 1)], "stop"),
    "stop of a MB": ("a" * 10**6, "stop"),
    "stops": (["a"] * 17, "stop"),
    "stop_token_ids": ([7] * (MAX_STOP_TOKENS + 1), "stop_token_ids"),
    "logit_bias": ({str(i): 1 for i in range(MAX_BIASED_TOKENS + 1)}, "logit_bias"),
    "cache_salt": ("s" * 257, "cache_salt"),
    "n": (129, "n"),
    "model": ("m" * 100_000, "model"),
    "x" * 100_000: (1, "x" * 200),
    "messages": ([{"role": "user", "content": "x", "name": "n" * 513}], "messages[0].name"),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_long_is_refused_by_name(served: Served, name: str) -> None:
    value, param = LONG[name]
    body = {"messages": HI, "n": 128, name.partition(" ")[0].replace("stops", "stop"): value}
    answer = send(served, "/v1/chat/completions", json.dumps(body))
    assert answer.status_code in (400, 404) and len(answer.text) < 3000
    assert answer.json()["error"]["param"].startswith(param)
    assert not served.submitted


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def messages(each: dict[str, Any], count: int = 1) -> str:
    return '{"messages":[' + ",".join([json.dumps(each)] * count) + "]}"


def ones(count: int, begin: str = '{"prompt":[', end: str = "]}") -> str:
    return begin + ",".join(["1"] * count) + end


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


TOO_MUCH = {
    "messages": (CHAT, messages(user("a"), 2000)),
    "10^5 messages": (CHAT, messages(user("a"), 100_000)),
    "parts": (CHAT, messages(user([{"type": "text", "text": "ab"}] * 3000))),
    "text": (CHAT, messages(user("a" * 3_000_000))),
    "text of a part": (CHAT, messages(user([{"type": "text", "text": "a" * 3_000_000}]))),
    "escapes": (CHAT, messages(user("\n" * 1_000_000))),
    "ids": (TEXT, ones(5000)),
    "10^6 ids": (TEXT, ones(1_000_000)),
    "ids in a list": (TEXT, ones(5000, '{"prompt":[[1],[', "]]}")),
    "ids to count": ("/tokenize", ones(1_000_000)),
    "ids to spell": ("/detokenize", ones(5000, '{"tokens":[')),
}


@pytest.mark.parametrize(("path", "body"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_cannot_fit_the_context_is_refused_as_such(
    served: Served, path: str, body: str
) -> None:
    error = refusal(served, body, path)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")


def test_a_body_of_too_many_values_is_refused_before_anything_is_built() -> None:
    body = bytearray(b'{"prompt":[' + b",".join([b"1"] * 2_000_000) + b"]}")
    tracemalloc.start()
    with pytest.raises(InvalidRequest) as caught:
        read_completion(body, CONTEXT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code == "context_length_exceeded" and peak < 4 << 20


def test_base64_with_escaped_slashes_is_no_long_text() -> None:
    check_size(bytearray(b'{"url":"' + (b"A" * 63 + b"\\/") * 100_000 + b'"}'), CONTEXT)


def test_the_others_are_answered_while_long_bodies_are_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that takes its time, as a large body's may, stands in no other request's way."""
    begun, go_on = threading.Event(), threading.Event()
    read = Reader.json

    def slow(self: Any, raw: Any, path: str) -> Any:
        if threading.current_thread().name.startswith("saccade-reader"):
            begun.set()
            assert go_on.wait(20)
        return read(self, raw, path)

    monkeypatch.setattr(Reader, "json", slow)
    body = json.dumps({"messages": HI, "user": "x" * 100_000})
    answers: list[Any] = []
    sender = threading.Thread(
        target=lambda: answers.append(send(served, "/v1/chat/completions", body))
    )
    sender.start()
    try:
        assert begun.wait(20)
        assert served.http.get("/health").status_code == 200
        assert send(served, "/v1/chat/completions", json.dumps({"messages": HI})).status_code == 200
    finally:
        go_on.set()
        sender.join(20)
    assert answers[0].status_code == 200


def test_long_prompts_are_tokenised_off_the_loop(served: Served) -> None:
    seen: list[str] = []
    tokenizer = served.front.intake.tokenizer
    encode = type(tokenizer).encode

    def watched(self: Any, text: str, *given: Any) -> list[int]:
        seen.append(threading.current_thread().name)
        return encode(self, text, *given)

    type(tokenizer).encode, content = watched, "中" * 9_000  # type: ignore[assignment, method-assign]
    try:
        served.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
        served.http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})
        served.http.post("/tokenize", json={"messages": HI * 200})
    finally:
        type(tokenizer).encode = encode  # type: ignore[method-assign]
    assert [name.startswith("saccade-reader") for name in seen] == [
        False,
        *[True] * (len(seen) - 1),
    ]
    assert len(seen) >= 2


def test_many_log_probabilities_are_written_as_they_come(served: Served) -> None:
    """Not all at once at the end: `/health` is answered between them."""
    served.engine.reply = lambda request: [20] * 30
    body = {"messages": HI, "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 30}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    choices = answer.json()["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [30] * 64
    assert all(
        len(entry["top_logprobs"]) == 20
        for choice in choices
        for entry in choice["logprobs"]["content"]
    )


def test_lone_paths_and_names_are_not_echoed_at_length(served: Served) -> None:
    answer = served.http.get("/" + "x" * 20_000)
    assert answer.status_code == 404 and len(answer.text) < 1000
