"""POST /tokenize, and what a request may say of a picture's size: costs are known before anything
is decoded.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from saccade.ipc.messages import Submit
from saccade.text.prompt.template import Tokenizer
from tests.helpers.echo import CONTEXT
from tests.helpers.served import TOKENIZER, Served


def data_url(size: tuple[int, int]) -> str:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def image(
    size: tuple[int, int], beside: dict[str, Any] | None = None, **inside: Any
) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(size), **inside}, **(beside or {})}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": list(parts)}], **fields}


def count(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    response = served.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_chat_is_counted_as_it_would_be_served_and_nothing_is_decoded(served: Served) -> None:
    body = chat({"type": "text", "text": "See: "}, image((300, 200)), image((64, 64)))
    counted = count(served, body)
    assert served.engine.received == []
    assert [
        served.front.metrics.value(f"saccade_images_{what}_total")
        for what in ("received", "decoded")
    ] == [0, 0]
    sizes = [(each["size"], each["resized"], each["tokens"]) for each in counted["images"]]
    square = {"width": 64, "height": 64}
    assert sizes == [
        ({"width": 300, "height": 200}, {"width": 288, "height": 192}, 54),
        (square, square, 4),
    ]
    assert [each["place"] for each in counted["images"]] == [
        "messages[0].content[1]",
        "messages[0].content[2]",
    ]
    assert {each["format"] for each in counted["images"]} == {"JPEG"}
    assert counted["max_model_len"] == CONTEXT
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    submitted = next(
        message.request for message in served.engine.received if isinstance(message, Submit)
    )
    assert (counted["count"], tuple(counted["tokens"])) == (len(submitted.tokens), submitted.tokens)


def test_images_beyond_the_context_are_counted_all_the_same(served: Served) -> None:
    assert count(served, chat(image((900, 900))))["count"] > CONTEXT


MARK = "\u0301"
"""A combining mark: the longest run of these within the bounds of bytes has most tokens."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", chat(*[image((900, 900))] * 6)),
        ("/tokenize", {"prompt": MARK * CONTEXT, "return_token_strs": True}),
        ("/tokenize", {"prompt": [10] * (CONTEXT + 1)}),
        ("/tokenize", chat({"type": "text", "text": MARK * CONTEXT})),
        ("/tokenize", chat({"type": "text", "text": "<|im_end|> " + MARK * CONTEXT})),
        ("/v1/messages/count_tokens", chat({"type": "text", "text": MARK * CONTEXT})),
        ("/v1/responses/input_tokens", {"input": MARK * CONTEXT}),
    ],
)
def test_a_prompt_beyond_the_context_is_refused_before_its_tokens_are_listed(
    served: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list[int]()
    make = Tokenizer.encode

    def note(self: Tokenizer, *given: Any, **named: Any) -> list[int]:
        tokens = make(self, *given, **named)
        listed.append(len(tokens))
        return tokens

    monkeypatch.setattr(Tokenizer, "encode", note)
    response = served.http.post(path, json=body)
    assert response.status_code == 400
    said = response.json()["error"]["message"]
    assert f"{CONTEXT} tokens" in said or f"{CONTEXT} maximum" in said, said
    assert max(listed, default=0) <= CONTEXT


def test_a_long_count_is_written_in_pieces(served: Served) -> None:
    """Its tokens are more than are written at a time."""
    tokens = [10, 11, 12] * (CONTEXT // 3)
    counted = count(served, {"prompt": tokens, "return_token_strs": True})
    assert (counted["count"], counted["tokens"]) == (len(tokens), tokens)
    assert counted["token_strs"] == [TOKENIZER.string(token) for token in tokens]


def test_text_prompts_are_counted_too(served: Served) -> None:
    counted = count(served, {"model": "demo", "prompt": "Hello!"})
    assert counted["tokens"] == TOKENIZER.encode("Hello!") and counted["images"] == []
    assert count(served, {"model": "demo", "prompt": [10, 11, 12]})["count"] == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "demo"}, "prompt"),
        ({"model": "demo", "prompt": ["a", "b"]}, "prompt"),
        ({"model": "demo", "messages": [], "prompt": "x"}, None),
        (
            chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
            "messages[0].content[0]",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_as_anywhere(
    served: Served, body: dict[str, Any], param: str | None
) -> None:
    response = served.http.post("/tokenize", json=body)
    assert response.status_code == 400
    assert param is None or response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "beside", "tokens"),
    [
        ({}, {}, 900),
        ({"detail": "auto"}, {}, 900),
        ({"detail": "high"}, {}, 900),
        ({"detail": "low"}, {}, 256),
        ({"max_pixels": 64 * 64}, {}, 4),
        ({}, {"max_pixels": 64 * 64}, 4),
        ({"max_pixels": 64 * 64}, {"max_pixels": 64 * 64}, 4),
        ({"max_pixels": 128 * 128}, {"min_pixels": 128 * 128}, 16),
        ({"detail": "low", "max_pixels": 64 * 64}, {}, 4),
    ],
)
def test_a_picture_may_have_its_own_budget_in_either_place(
    served: Served, fields: Any, beside: Any, tokens: int
) -> None:
    assert count(served, chat(image((960, 960), beside, **fields)))["images"][0]["tokens"] == tokens


def test_a_small_picture_may_be_enlarged(served: Served) -> None:
    assert count(served, chat(image((64, 64), min_pixels=256 * 256)))["images"][0]["resized"] == {
        "width": 256,
        "height": 256,
    }


@pytest.mark.parametrize(
    ("fields", "beside", "param"),
    [
        ({"max_pixels": 4096}, {"max_pixels": 8192}, "messages[0].content[0].max_pixels"),
        ({"min_pixels": 8192, "max_pixels": 4096}, {}, "messages[0].content[0]"),
        ({"max_pixels": 10**9}, {}, "messages[0].content[0]"),
        ({"max_pixels": 10}, {}, "messages[0].content[0]"),
        ({"max_pixels": 0}, {}, "messages[0].content[0].image_url.max_pixels"),
        ({"zoom": 3}, {}, "messages[0].content[0].image_url.zoom"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused_at_its_place(
    served: Served, fields: Any, beside: Any, param: str
) -> None:
    response = served.http.post("/tokenize", json=chat(image((64, 64), beside, **fields)))
    assert response.status_code == 400 and response.json()["error"]["param"] == param
