"""A prompt that was computed before its question costs as much as one asked for the second time,
whichever client's words asked for it.
"""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from saccade_bench.fixtures.server import Server
from tests.e2e.ways import KEY
from tests.fixtures.tiny import picture
from tests.helpers.images import png_url
from tests.media.pictures import encode

pytestmark = pytest.mark.more

TEXT = "what is there in this image? " * 8
PREWARM: Any = {"prewarm": True}


COUNTED = (
    "saccade_images_encoded_total",
    "saccade_image_patches_encoded_total",
    "saccade_cached_tokens_total",
    "saccade_prompt_tokens_total",
)


def counted(server: Server) -> list[float]:
    return [server.metric(name) for name in COUNTED]


def chats(server: Server, image: str, *, warm: bool) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": image}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [part, {"type": "text", "text": TEXT}]}],
            max_tokens=0 if warm else 4,
            temperature=0,
        )


def responds(server: Server, image: str, *, warm: bool) -> None:
    part: Any = {"type": "input_image", "image_url": image}
    text: Any = {"type": "input_text", "text": TEXT}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        made = client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": [part, text]}],
            prompt_cache_options=PREWARM if warm else openai.omit,
            max_output_tokens=4,
            temperature=0,
        )
    assert bool(made.output) != warm


def messages(server: Server, image: str, *, warm: bool) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": image.partition(",")[2]}
    shown: Any = {"type": "image", "source": source}
    text: Any = {"type": "text", "text": TEXT}
    with anthropic.Anthropic(base_url=server.url, api_key=KEY) as client:
        client.messages.create(
            model="tiny",
            messages=[{"role": "user", "content": [shown, text]}],
            max_tokens=0 if warm else 4,
        )


@pytest.mark.parametrize("ask", [chats, responds, messages])
def test_a_prewarmed_question_costs_what_a_second_one_does(server: Server, ask: Any) -> None:
    def cost(seed: int, *, warm: bool) -> list[float]:
        image = png_url(picture(90, 120, seed=seed))
        ask(server, image, warm=warm)
        before = counted(server)
        ask(server, image, warm=False)
        return [now - then for now, then in zip(counted(server), before, strict=True)]

    seed = 10 * (1 + [chats, responds, messages].index(ask))
    prewarmed, second = cost(seed, warm=True), cost(seed + 1, warm=False)
    assert prewarmed == second and prewarmed[:2] == [0, 0]
    cached, prompt = prewarmed[2:]
    assert prompt - 16 <= cached < prompt, "all but the last page"


BEFORE: list[Any] = [
    {"role": "system", "content": "You look at images, and say little."},
    {"role": "user", "content": "Look at this one:"},
]


def uploaded(server: Server, seed: int, **more: Any) -> str:
    """The id of an uploaded image, got ready if `more` says so."""
    data = encode(picture(400, 300, seed=seed))
    done = server.metric("saccade_warm_total", outcome="done")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        made = client.files.create(file=("a.png", data), purpose="vision", **more)
    if more:
        server.wait_for_metric("saccade_warm_total", done + 1, outcome="done")
    return made.id


@pytest.mark.parametrize("prefix", [[], BEFORE], ids=["image alone", "after messages"])
def test_the_first_question_about_a_warm_upload_costs_what_a_second_one_does(
    server: Server, prefix: list[Any]
) -> None:
    """Through the SDK as it is: it writes nested objects as fields of a form."""
    warm = {"max_pixels": 65536, **({"prefix": prefix} if prefix else {})}

    def cost(id: str, question: str) -> list[float]:
        part: Any = {"type": "file", "file": {"file_id": id}, "max_pixels": 65536}
        asked: Any = {"role": "user", "content": [part, {"type": "text", "text": question}]}
        before = counted(server)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            client.chat.completions.create(
                model="tiny", messages=[*prefix, asked], max_tokens=4, temperature=0
            )
        return [now - then for now, then in zip(counted(server), before, strict=True)]

    seed = 100 + 10 * bool(prefix)
    first = cost(uploaded(server, seed, extra_body={"warm": warm}), "what is there?")
    cold = uploaded(server, seed + 1)
    assert cost(cold, "name its colour")[0] == 1, "nobody has encoded it before"
    assert first == cost(cold, "what is there?"), "the image, and all that stands before it"
    assert first[:2] == [0, 0] and first[2] > 0


def test_a_warm_upload_through_anthropics_sdk(server: Server) -> None:
    data = encode(picture(200, 100, seed=130))
    done = server.metric("saccade_warm_total", outcome="done")
    encoded = server.metric("saccade_images_encoded_total")
    with anthropic.Anthropic(base_url=server.url, api_key=KEY) as client:
        made = client.beta.files.upload(
            file=("a.png", data), extra_body={"saccade": {"warm": {"max_pixels": 40000}}}
        )
        server.wait_for_metric("saccade_warm_total", done + 1, outcome="done")
        assert server.metric("saccade_images_encoded_total") == encoded + 1
        shown: Any = {
            "type": "image",
            "source": {"type": "file", "file_id": made.id},
            "max_pixels": 40000,
        }
        asked: Any = {"role": "user", "content": [shown, {"type": "text", "text": "what is it?"}]}
        client.messages.create(model="tiny", messages=[asked], max_tokens=4)
    assert server.metric("saccade_images_encoded_total") == encoded + 1
