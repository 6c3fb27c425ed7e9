"""The answer of POST /v1/decisions.

Owns its shapes, and what the labels' logits become: probabilities of the labels among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from saccade.front.readings import WasRead
from saccade.plugins.decisions.fields import ChoiceQuestion, PredicateQuestion, Question


class ChoiceProbability(Struct):
    """A value's probability."""

    value: str | bool
    probability: float


class LevelProbability(Struct):
    """A level's probability."""

    label: str
    probability: float
    value: int
    """The level's place. The first is 1."""


class PredicateAnswer(Struct, tag_field="type", tag="predicate"):
    """A statement's probability."""

    name: str | None
    probability: float


class ChoiceAnswer(Struct, tag_field="type", tag="choice"):
    """The likeliest value. confidence: its probability."""

    name: str | None
    choice: str | bool
    """The likeliest value."""
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreAnswer(Struct, tag_field="type", tag="score"):
    """The levels' mean place, weighted by probability. confidence: the likeliest level's."""

    name: str | None
    score: float
    """The mean of the levels' places, weighted by their probabilities."""
    confidence: float
    probabilities: list[LevelProbability]


class DecisionInputDetails(Struct):
    """Counts among the input's tokens: those from the cache, and those kept from now on."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(Struct):
    """Always 0: decisions come without reasoning."""

    reasoning_tokens: int = 0
    """Always 0."""


class DecisionUsage(Struct):
    """Tokens in all questions' prompts, each with the input in it. Each answer is one label."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    """The input's tokens, split by cost."""
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    """The answers' tokens, split by kind."""
    total_tokens: int


class Decision(Struct):
    """The answers, in the questions' order."""

    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    """The answers, in the questions' order."""
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
