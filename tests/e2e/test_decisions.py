"""Decisions over HTTP: an image is encoded once for all questions, answers are the same alone and
beside others and are what transformers makes of the same prompt; the SDK is spoken to unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from saccade_bench.fixtures.server import Server
from tests.e2e.test_scores import Author
from tests.e2e.ways import KEY
from tests.fixtures.tiny import Reference, picture
from tests.helpers.images import png_url

pytestmark = pytest.mark.more

PAGE = picture(120, 200, seed=3)
INPUT = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": png_url(PAGE)},
            {"type": "input_text", "text": "how many red circles are there?"},
        ],
    }
]
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "fox", "instructions": "There is a fox."},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Which colour?"}],
        "choices": [
            {"value": "red", "description": "as blood"},
            {"value": True},
            {"value": "true"},
        ],
    },
    {
        "type": "score",
        "name": "light",
        "instructions": [{"type": "input_json", "data": {"how": "bright"}}],
        "levels": [{"label": "dark"}, {"label": "dim"}, {"label": "bright", "description": "sun"}],
    },
]


def likely(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"]]
    return [each["probability"] for each in answer["probabilities"]]


def test_questions_share_one_image_and_answers_are_those_of_each_alone(server: Server) -> None:
    many = [
        {"type": "predicate", "name": f"{i}", "instructions": f"There are {i} blue squares."}
        for i in range(60)
    ]
    before = server.metric("saccade_images_encoded_total")
    body = {"input": INPUT, "questions": [*QUESTIONS, *many]}
    together = server.post("/v1/decisions", body)
    assert server.metric("saccade_images_encoded_total") == before + 1
    assert [each["name"] for each in together["answers"][3:]] == [f"{i}" for i in range(60)]
    usage = together["usage"]
    assert usage["output_tokens"] == 63
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert cached >= 62 * 64, "all but the first take the pages of what they share"
    again = server.post("/v1/decisions", body)
    assert again["answers"] == together["answers"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == usage["input_tokens"]
    for place in (0, 1, 2, 40):
        question = body["questions"][place]
        salted = {"input": INPUT, "questions": [question], "cache_salt": "alone"}
        (alone,) = server.post("/v1/decisions", salted)["answers"]
        assert likely(alone) == pytest.approx(likely(together["answers"][place]), abs=1e-5)


def test_probabilities_are_those_of_transformers(
    server: Server, checkpoint: Callable[..., Path], reference: Callable[..., Reference]
) -> None:
    author = Author(checkpoint("qwen3_vl"), reference("qwen3_vl"))
    text = "how many red circles are there?"
    asked = (
        "Is this statement true? Answer with one word, Yes or No.\nStatement: There is a fox.",
        "Which of the options fits best? Answer with its label alone.\n"
        "Which colour?\nA: red (as blood)\nB: true\nC: true",
    )
    answers = server.post("/v1/decisions", {"input": INPUT, "questions": QUESTIONS})["answers"]
    system = "You are a helpful assistant."  # which the template writes by itself
    for question, labels, answer in zip(asked, (("Yes", "No"), "ABC"), answers):
        ids, pixels = author.ids(system, (PAGE, text, "\n\n", question))
        tokens = [author.tokenizer(label).input_ids[0] for label in labels]
        logits = author.reference.logits(ids, pixels)[-1][tokens]
        expected = torch.softmax(logits, dim=0).tolist()
        assert likely(answer) == pytest.approx(expected[: len(likely(answer))], abs=1e-4)
    choice, score = answers[1], answers[2]
    best = int(np.argmax(likely(choice)))
    assert choice["choice"] is ("red", True, "true")[best] or choice["choice"] == "red"
    assert choice["confidence"] == max(likely(choice))
    assert score["score"] == pytest.approx(sum(i * p for i, p in enumerate(likely(score), 1)))
    assert [each["value"] for each in score["probabilities"]] == [1, 2, 3]


def test_openais_sdk_is_answered(server: Server) -> None:
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    if not hasattr(client, "decisions"):
        pytest.skip("this openai has no decisions")
    model = client.models.list().data[0].id
    decision = client.decisions.create(model=model, input=INPUT, questions=QUESTIONS)
    kinds = [type(answer).__name__ for answer in decision.answers]
    assert [kind[len("AnswerAnswerResource") :] for kind in kinds] == [
        *("Predicate", "Choice", "Score")
    ]
    told = client.decisions.create(model=model, input="two blue squares", questions=QUESTIONS[:1])
    assert 0 < told.answers[0].probability < 1 and told.model == model


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"questions": []}, "questions", "from 1 to 400, got 0"),
        ({"questions": [QUESTIONS[0]] * 401}, "questions", "from 1 to 400, got 401"),
        ({"questions": [{"type": "essay"}]}, "questions[0].type", "only"),
        (
            {"questions": [{**QUESTIONS[1], "choices": [{"value": "a"}]}]},
            "questions[0].choices",
            "length >= 2",
        ),
        (
            {"questions": [{**QUESTIONS[1], "choices": [{"value": "a"}] * 2}]},
            "questions[0].choices",
            "the entries must differ",
        ),
        ({"input": []}, "input", "at least one message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "earlier responses"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    server: Server, change: dict[str, Any], param: str, says: str
) -> None:
    body = {"input": INPUT, "questions": QUESTIONS, **change}
    error = server.post("/v1/decisions", body, 400)["error"]
    assert error["param"] == param and says in error["message"], error


def test_a_clients_special_tokens_in_a_question_are_text(server: Server) -> None:
    plain = {"type": "predicate", "instructions": "a <|im_end|> b"}
    tail = {"type": "predicate", "instructions": "a b"}
    answer = server.post("/v1/decisions", {"input": "x", "questions": [plain, tail]})
    alone = server.post("/v1/decisions", {"input": "x", "questions": [tail]})
    longer = answer["usage"]["input_tokens"] - 2 * alone["usage"]["input_tokens"]
    assert longer > 5, "the token's name was taken for the token"
