"""A rendered prompt is the one that the engine gets. Nothing is decoded for it."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.ipc.messages import Submit
from tests.api.test_tokenize import chat, image
from tests.helpers.served import TOKENIZER, Served


def render(served: Served, path: str, body: dict[str, Any]) -> Any:
    response = served.http.post(f"{path}/render", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def submitted(served: Served) -> Submit:
    (submit,) = [each for each in served.engine.received if isinstance(each, Submit)]
    return submit


def test_a_rendered_chat_is_the_one_that_is_answered(served: Served) -> None:
    body = chat(image((300, 200)), {"type": "text", "text": " and "}, image((64, 64)))
    decoded = served.front.metrics.value("saccade_images_decoded_total")
    rendered = render(served, "/v1/chat/completions", body)
    assert served.engine.received == []
    assert served.front.metrics.value("saccade_images_decoded_total") == decoded
    served.http.post("/v1/chat/completions", json=body).raise_for_status()
    request = submitted(served).request
    assert tuple(rendered["token_ids"]) == request.tokens
    assert rendered["features"] == {
        "mm_hashes": {"image": [each.key.identifier for each in request.images]},
        "mm_placeholders": {
            "image": [{"offset": each.start, "length": each.length} for each in request.spans]
        },
    }
    assert (rendered["model"], rendered["cache_salt"]) == ("demo", None)


def test_an_image_is_named_by_its_bytes_and_size_and_not_by_its_salt(served: Served) -> None:
    def hashes(*parts: dict[str, Any], **fields: Any) -> list[str]:
        features = render(served, "/v1/chat/completions", chat(*parts, **fields))["features"]
        found: list[str] = features["mm_hashes"]["image"]
        return found

    (one,) = hashes(image((300, 200)))
    assert hashes(image((300, 200)), image((64, 64)), cache_salt="tenant")[0] == one
    assert hashes(image((300, 201))) != [one]
    assert hashes(image((300, 200), max_pixels=20000)) != [one]


def test_a_text_has_no_features_and_each_prompt_of_a_completion_is_rendered(served: Served) -> None:
    text = render(served, "/v1/chat/completions", chat({"type": "text", "text": "Hi"}))
    assert text["features"] is None
    for prompt, tokens in (
        (["a", "Hi"], [TOKENIZER.encode(each) for each in ("a", "Hi")]),
        ([40, 41], [[40, 41]]),
    ):
        found = render(served, "/v1/completions", {"model": "demo", "prompt": prompt})
        assert [each["token_ids"] for each in found] == tokens


def test_a_message_is_rendered_as_the_same_chat(served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ours = render(served, "/v1/chat/completions", {"messages": messages})
    theirs = render(
        served, "/v1/messages", {"model": "demo", "max_tokens": 5, "messages": messages}
    )
    assert theirs["token_ids"] == ours["token_ids"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_wrong_field_and_an_unknown_model_are_named(served: Served, path: str) -> None:
    body = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": 3}]}
    wrong = served.http.post(f"{path}/render", json=body)
    assert wrong.status_code == 400 and "content" in wrong.text
    body |= {"model": "no", "messages": [{"role": "user", "content": "Hi"}]}
    unknown = served.http.post(f"{path}/render", json=body)
    assert unknown.status_code == 404 and "'no'" in unknown.text
