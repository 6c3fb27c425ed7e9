"""Describes decisions in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Description
from saccade.plugins.decisions import fields
from saccade.plugins.decisions.write import Decision
from saccade.plugins.responses.description import EXAMPLE_INPUT

OPERATIONS = Description(
    (
        ApiOperation(
            "post",
            "/v1/decisions",
            "Return the probabilities of answers to many questions about one input, as in "
            "OpenAI's API",
            "DecisionsRequest",
            "Decision",
            {
                "input": EXAMPLE_INPUT,
                "questions": [
                    {"type": "predicate", "instructions": "The square is red."},
                    {
                        "type": "choice",
                        "instructions": "Which colour is it?",
                        "choices": [{"value": "red"}, {"value": "blue"}],
                    },
                ],
            },
        ),
    ),
    bodies={"DecisionsRequest": (fields.DECISIONS,)},
    types=(
        Decision,
        fields.PredicateQuestion,
        fields.ChoiceQuestion,
        fields.ScoreQuestion,
    ),
    words={
        "label": "The level's name.",
        "confidence": "The likeliest value's probability.",
        "probability": "How likely this answer is among the possible answers.",
        "probabilities": "How likely each answer is.",
    },
)
