"""Structured outputs over HTTP: a real server on random weights at temperature 1, asked by the
unchanged `openai` SDK. Whatever such a model says is of the form that was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from saccade_bench.fixtures.server import Server, serving
from tests.e2e.ways import KEY, WAYS, perhaps_routed
from tests.fixtures.schemas import SchemaMaker
from tests.fixtures.tiny import picture
from tests.helpers.images import image_part, text_part, user

pytestmark = pytest.mark.more

OPTIONS = ("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "65536")
HOT = {"model": "tiny", "temperature": 1.0}


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Shape(BaseModel):
    kind: Literal["circle", "square"]
    colour: Colour
    size: Annotated[float, Field(ge=0, lt=10)]


class Scene(BaseModel):
    title: Annotated[str, Field(max_length=12)]
    shapes: Annotated[list[Shape], Field(max_length=2)]
    note: Annotated[str, Field(max_length=5)] | None


@pytest.fixture(scope="module", params=WAYS)
def server(
    tiny: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with perhaps_routed(tiny, request.param, tmp_path_factory.mktemp("logs")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def closing(server: Server) -> dict[str, float]:
    """Biases under which random weights end their documents."""
    found = {}
    for text in ('"', "}", "]", "0"):
        found[str(server.post("/tokenize", {"prompt": text})["tokens"][-1])] = 6.0
    return found


def format_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def check(server: Server, schema: Any, seed: int, bias: dict[str, float], most: int = 300) -> str:
    """Ask for a document: whole and valid, cut by its length, or refused before any token."""
    body = {
        **HOT,
        "messages": [{"role": "user", "content": "say"}],
        "response_format": format_of(schema),
        "seed": seed,
        "max_tokens": most,
        "logit_bias": bias,
    }
    answer = server.send("/v1/chat/completions", body).json()
    if "error" in answer:
        assert answer["error"]["type"] == "invalid_request_error", answer
        assert answer["error"]["param"].startswith("response_format.json_schema.schema"), answer
        return "refused"
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    else:
        assert answer["usage"]["completion_tokens"] == most
    return str(choice["finish_reason"])


@pytest.mark.parametrize("shown", [False, True], ids=["text", "image"])
def test_the_sdk_parses_an_answer_into_a_model(client: Any, shown: bool) -> None:
    parts = [image_part(picture(64, 96))] * shown
    ask = {**HOT, "messages": [user(*parts, text_part("what?"))], "response_format": Scene}
    parsed = client.chat.completions.parse(**ask, seed=1).choices[0].message.parsed
    assert isinstance(parsed, Scene) and len(parsed.shapes) <= 2
    with client.chat.completions.stream(**ask, seed=1) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    assert final.choices[0].finish_reason == "stop"


def test_answers_of_one_request_differ_and_each_is_whole(client: Any) -> None:
    answer = client.chat.completions.create(
        **HOT,
        messages=[user(text_part("what?"))],
        response_format=format_of(Scene.model_json_schema()),
        n=4,
        seed=5,
        logprobs=True,
        top_logprobs=2,
    )
    scenes = [Scene.model_validate_json(choice.message.content) for choice in answer.choices]
    assert len({scene.title for scene in scenes}) > 1
    for choice in answer.choices:
        shown = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
        assert shown.decode().startswith(choice.message.content)


def test_generated_schemas_are_kept_to(server: Server, closing: dict[str, float]) -> None:
    maker = SchemaMaker(11)
    schemas = [maker.schema() for _ in range(24)]
    with ThreadPoolExecutor(12) as pool:
        ends = list(
            pool.map(lambda case: check(server, case[1], case[0], closing), enumerate(schemas))
        )
    assert ends.count("stop") > 12 and set(ends) <= {"stop", "length", "refused"}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_grammar": 'start: "a" b\nb: /[xy]{4}/'}, "a[xy]{4}"),
        ({"structured_outputs": {"choice": ["é", "e"]}}, "é|e"),
        ({"guided_json": {"enum": [1, "two"]}}, '1|"two"'),
        ({"response_format": {"type": "json_object"}, "max_tokens": 5}, r"\{.*"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_spelling_means_the_same_in_chats_and_completions(
    server: Server, path: str, fields: dict[str, Any], pattern: str
) -> None:
    asked = {"prompt": "say "} if path == "completions" else {"messages": [user(text_part("say"))]}
    body = {**HOT, "seed": 3, "min_tokens": 2, **asked, **fields}
    (choice,) = server.post(f"/v1/{path}", body)["choices"]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    assert re.fullmatch(pattern, text, re.DOTALL), text


def test_what_no_grammar_holds_is_refused_by_its_place(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    body = {**HOT, "messages": [user(text_part("x"))], "response_format": format_of(schema)}
    refused = server.post("/v1/chat/completions", body, status=400)
    place = "response_format.json_schema.schema.properties.a.not"
    assert refused["error"]["param"] == place


@pytest.mark.slow
def test_a_thousand_generated_schemas_are_kept_to(
    server: Server, closing: dict[str, float]
) -> None:
    maker = SchemaMaker(2026)
    schemas = [maker.schema() for _ in range(1000)]
    with ThreadPoolExecutor(32) as pool:
        ends = list(
            pool.map(
                lambda case: check(server, case[1], case[0], closing, 1000), enumerate(schemas)
            )
        )
    print({end: ends.count(end) for end in set(ends)})
    assert ends.count("stop") > 700


@pytest.mark.slow
def test_plain_rows_say_the_same_beside_two_hundred_grammars(
    server: Server, closing: dict[str, float]
) -> None:
    maker = SchemaMaker(7)

    def plain(seed: int) -> str:
        body = {**HOT, "prompt": f"row {seed}", "seed": seed, "max_tokens": 40}
        return str(server.post("/v1/completions", body)["choices"][0]["text"])

    with ThreadPoolExecutor(400) as pool:
        alone = list(pool.map(plain, range(200)))
        schemas = [maker.schema() for _ in range(200)]
        futures = [
            pool.submit(check, server, schema, seed, closing) for seed, schema in enumerate(schemas)
        ]
        beside = list(pool.map(plain, range(200)))
        for future in futures:
            future.result()
    assert alone == beside


@pytest.mark.slow
def test_two_ranks_draw_what_one_does(
    checkpoint: Callable[..., Path], server: Server, tmp_path: Path, closing: dict[str, float]
) -> None:
    def ask(asked: Server, seed: int) -> str:
        body = {**HOT, "prompt": "say ", "seed": seed, "max_tokens": 60, "logit_bias": closing}
        body["guided_json"] = Scene.model_json_schema()
        return str(asked.post("/v1/completions", body)["choices"][0]["text"])

    with serving(checkpoint("qwen3_vl"), tmp_path, *OPTIONS, "--tp-size", "2") as two:
        for seed in range(6):
            assert ask(server, seed) == ask(two, seed)
