from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from blake3 import blake3

from saccade.media.sources.inline import decode_base64
from saccade.plugins.route.affinity import AffinityKey, bearing_of_body, bearing_of_path
from tests.helpers.images import data_url

DATA = b"\x89PNG not one at all, and nobody looks"
DIGEST = blake3(DATA).digest()
TEXT = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{TEXT}"
FILE = f"file-{DIGEST.hex()}-0123abcd"
OTHER = data_url(b"another")
ANSWER = {"role": "assistant", "content": "yes"}


def bearing(**body: Any) -> AffinityKey:
    return bearing_of_body(json.dumps(body).encode())


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


NAME = f"blake3-{DIGEST.hex()}"
PARTS = {
    "chat": image(URL),
    "chat, a text": {"type": "image_url", "image_url": URL},
    "lines, no padding": image("data:image/png;base64," + TEXT[:20] + "\n" + TEXT[20:].rstrip("=")),
    "responses": {"type": "input_image", "image_url": URL},
    "responses, a file": {"type": "input_image", "file_id": FILE},
    "an uploaded file": {"type": "file", "file": {"file_id": FILE}},
    "an inline file": {"type": "file", "file": {"file_data": URL}},
    "bare base64": {"type": "file", "file": {"file_data": TEXT}},
    "an image file": {"type": "image_file", "image_file": {"file_id": FILE}},
    "an object": {"type": "image", "image": URL},
    "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "x", "data": TEXT}},
    "anthropic, a file": {"type": "image", "source": {"type": "file", "file_id": FILE}},
    "a digest": {"type": "image_url", "image_url": {"digest": NAME, "region": [0, 0, 9, 9]}},
    "responses, a digest": {"type": "input_image", "digest": NAME},
    "anthropic, a digest": {"type": "image", "source": {"type": "digest", "digest": NAME}},
    "a tool's result": {
        "type": "tool_result",
        "content": [{"type": "image", "source": {"type": "base64", "data": TEXT}}],
    },
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_an_image_has_one_key_however_it_is_sent(part: dict[str, Any]) -> None:
    message = user({"type": "text", "text": "what?"}, part, image(OTHER))
    assert bearing(messages=[message]).keys == (DIGEST,)
    assert bearing(input=[{"type": "message", **message}]).keys == (DIGEST,)


def test_a_url_has_a_key_of_its_own() -> None:
    url = "https://example.com/a.png"
    first, again, other = (
        bearing(messages=[user(part)]).keys
        for part in (
            image(url),
            {"type": "image", "source": {"type": "url", "url": url}},
            image(url + "?2"),
        )
    )
    assert first == again != other


def test_an_image_that_may_come_again_by_its_name_alone_is_ranked_by_it() -> None:
    named = {**image(URL), "uuid": "page 1"}
    alone = {"type": "image_url", "image_url": None, "uuid": "page 1"}
    assert bearing(messages=[user(named)]) == bearing(messages=[user(alone)])
    assert bearing(messages=[user(named)]).keys != (DIGEST,)


def test_a_chat_keeps_its_key_from_the_first_image_on() -> None:
    chat = [{"role": "system", "content": "Be brief."}, user(image(URL), "what is it?")]
    key = bearing(messages=chat, model="m")
    for number in range(5):
        chat += [ANSWER, user(image(f"{OTHER}{number}"), "and this?")]
        assert bearing(temperature=number, messages=chat) == key


def test_a_chat_of_text_keeps_its_key_and_others_have_others() -> None:
    system = {"role": "system", "content": "The same for everybody."}
    chat = [system, {"role": "user", "content": "What is a saccade?"}]
    key = bearing(messages=chat)
    assert len(key.keys) == 1
    longer = [*chat, ANSWER, {"role": "user", "content": "Are you sure?"}]
    assert bearing(messages=longer) == key
    marked = {"role": "user", "content": [{"type": "text", "text": "What is a saccade?"}]}
    marked["content"][0]["cache_control"] = {"type": "ephemeral"}  # type: ignore[index]
    assert bearing(messages=[system, marked, ANSWER]) == key
    assert bearing(messages=[system, user("What else?")]) != key
    assert bearing(messages=chat, cache_salt="mine") != key
    assert bearing(messages=chat, prompt_cache_key="mine") != key
    assert bearing(messages=chat[1:], system="Another.") != bearing(messages=chat[1:])


def test_prompts_are_ranked_by_their_beginning() -> None:
    long = "x" * 5000
    assert bearing(prompt=long) == bearing(prompt=long + "y")
    assert bearing(prompt="a") != bearing(prompt="b")
    assert bearing(prompt=[1, 2, 3]) != bearing(prompt=[1, 2, 4])
    assert bearing(input="a").keys != bearing(input="b").keys


def test_what_continues_a_response_goes_where_it_is_kept() -> None:
    name = "resp_0badcafe" + "1" * 40
    assert bearing(input="and?", previous_response_id=name).holder == "0badcafe"
    assert bearing(input="and?", previous_response_id="resp_1").holder == ""
    assert bearing(input="and?", previous_response_id=["x"]).holder == ""
    assert bearing_of_path(f"/v1/responses/{name}/input_items").holder == "0badcafe"
    assert bearing_of_path(f"/v1/files/{FILE}/content").keys == (DIGEST,)
    assert bearing_of_path("/v1/models") == AffinityKey()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"messages": 3}',
        b'{"messages": [3, null, "x", [], {}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"content": [{"type": "image_url", "image_url": 7}]}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
        b'{"messages": [{"content": "\xff"}]}',
        b'{"input": {"a": 1}}',
        b'{"prompt": {"a": 1}}',
    ],
    ids=range(12),
)
def test_what_makes_no_sense_has_no_key(body: bytes) -> None:
    assert bearing_of_body(body) == AffinityKey()


def test_an_image_that_is_no_base64_still_has_a_key() -> None:
    broken = bearing(messages=[user(image("data:image/png;base64,!!!"))])
    assert len(broken.keys) == 1
    lone = b'{"messages": [{"content": [{"image_url": "\\ud800"}]}]}'
    assert bearing_of_body(lone) == bearing_of_body(lone)


def test_what_is_embedded_or_ranked_goes_by_its_first_image() -> None:
    key = bearing(messages=[user(image(URL))])
    page = {"content": [{"type": "text", "text": "page"}, image(URL)]}
    assert bearing(query="which?", documents=["text", page]) == key
    assert bearing(inputs=[page]) == key
    assert bearing(messages=[[user(image(URL))], [user(image(OTHER))]]) == key
    assert bearing(input=["a", "b"]) == bearing(input=["a", "c"]) != bearing(input=["b"])
    assert bearing(messages=[user(image(URL))], documents={"odd": 1}) == key


def test_nothing_is_decoded_after_the_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    real = decode_base64
    monkeypatch.setattr(
        "saccade.plugins.route.affinity.decode_base64",
        lambda *args: (decoded.append(len(args[0])), real(*args))[1],
    )
    bearing(messages=[user(image(OTHER)), *(user(image(URL)) for _ in range(50))])
    assert decoded == [len(OTHER)]
