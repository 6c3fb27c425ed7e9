"""OpenAI's `prediction`, and the guesses that answers tell of."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.core.types import DraftCounts
from saccade.front.prompt_encoder import PREDICTED_CHARS
from tests.api.test_tolerance import post
from tests.helpers.served import TOKENIZER, Served


@pytest.mark.parametrize(
    "content",
    ["say Hello!", [{"type": "text", "text": "say "}, {"type": "text", "text": "Hello!"}]],
)
def test_a_prediction_goes_to_the_engine_as_tokens(served: Served, content: Any) -> None:
    answer = post(served, prediction={"type": "content", "content": content}, n=2)
    assert answer.status_code == 200
    expected = tuple(TOKENIZER.encode("say Hello!"))
    assert [each.caching.prediction for each in served.submitted[-2:]] == [expected, expected]


def test_a_prediction_beside_what_openai_refuses_it_for_changes_no_answer(served: Served) -> None:
    for more in ({"logprobs": True}, {"presence_penalty": 1}, {"max_completion_tokens": 3}):
        prediction = {"type": "content", "content": "Hello!"}
        answer = post(served, prediction=prediction, **more)
        assert answer.status_code == 200
        assert answer.json()["choices"] == post(served, **more).json()["choices"]


def test_a_long_prediction_is_cut(served: Served) -> None:
    text = "ab " * 3000
    post(served, prediction={"type": "content", "content": text})
    prediction = served.submitted[-1].caching.prediction
    assert prediction == tuple(TOKENIZER.encode(text[:PREDICTED_CHARS]))


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("Hello!", "prediction"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
    ],
)
def test_a_prediction_of_another_shape_is_refused_by_name(
    served: Served, prediction: Any, param: str
) -> None:
    answer = post(served, prediction=prediction)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prediction"), answer.text
    assert param.split(".")[0] in answer.json()["error"]["message"]


def test_usage_and_trace_count_right_and_wrong_guesses_by_source(served: Served) -> None:
    served.engine.draft_counts = ()
    assert "completion_tokens_details" not in post(served).json()["usage"]
    served.engine.draft_counts = DraftCounts("image", 2, 1), DraftCounts("text", 1, 0)
    body = post(served, saccade={"trace": True}).json()
    assert body["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 1,
    }
    assert body["saccade"]["guesses"] == [
        {"source": "image", "right": 2, "wrong": 1},
        {"source": "text", "right": 1, "wrong": 0},
    ]
    answer = served.openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}]
    )
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 1)
