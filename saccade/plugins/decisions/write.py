"""The response of POST /v1/decisions.

Probabilities are computed from the labels' logits, and normalized over the labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from saccade.front.read_requests import WasRead
from saccade.plugins.decisions.fields import ChoiceQuestion, PredicateQuestion, Question


class ChoiceProbability(Struct):
    """The probability of a value."""

    value: str | bool
    probability: float


class LevelProbability(Struct):
    """The probability of a level."""

    label: str
    probability: float
    value: int
    """The index of the level. The first is 1."""


class PredicateAnswer(Struct, tag_field="type", tag="predicate"):
    """The probability that a statement is true."""

    name: str | None
    probability: float


class ChoiceAnswer(Struct, tag_field="type", tag="choice"):
    """The most likely value. confidence: its probability."""

    name: str | None
    choice: str | bool
    """The most likely value."""
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreAnswer(Struct, tag_field="type", tag="score"):
    """The mean of the levels' indices. confidence: the probability of the most likely level."""

    name: str | None
    score: float
    """The mean of the levels' indices, weighted by their probabilities."""
    confidence: float
    probabilities: list[LevelProbability]


class DecisionInputDetails(Struct):
    """The input's tokens that were read from the cache, and those that were added to it."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(Struct):
    """Always 0 because decisions have no reasoning."""

    reasoning_tokens: int = 0
    """Always 0."""


class DecisionUsage(Struct):
    """The tokens of all prompts. Each prompt contains the input. Each answer is one label."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    """Details on the input's tokens."""
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    """Details on the answers' tokens."""
    total_tokens: int


class Decision(Struct):
    """The answers, in the order of the questions."""

    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    """The answers, in the order of the questions."""
    model: str
    usage: DecisionUsage


def decision(questions: Sequence[Question], read: Sequence[WasRead], model: str) -> Decision:
    answers = [_answer(question, each) for question, each in zip(questions, read, strict=True)]
    total, count = sum(each.tokens for each in read), len(read)
    cached, written = sum(each.cached for each in read), sum(each.written for each in read)
    usage = DecisionUsage(
        total, DecisionInputDetails(cached, written), count, DecisionOutputDetails(), total + count
    )
    return Decision(answers, model, usage)


def _answer(question: Question, read: WasRead) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    logits = read.values[-1].astype(np.float64)
    powers = np.exp(logits - logits.max())
    likely = [float(each) for each in powers / powers.sum()]
    best = int(np.argmax(likely))
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(question.name, likely[0])
    if isinstance(question, ChoiceQuestion):
        values = [each.value for each in question.choices]
        choices = [ChoiceProbability(value, p) for value, p in zip(values, likely, strict=True)]
        return ChoiceAnswer(question.name, values[best], likely[best], choices)
    levels = [
        LevelProbability(level.label, p, place)
        for place, (level, p) in enumerate(zip(question.levels, likely, strict=True), 1)
    ]
    mean = sum(each.value * each.probability for each in levels)
    return ScoreAnswer(question.name, mean, likely[best], levels)
