"""The body of POST /v1/decisions, as in OpenAI's API: fields and errors.

`read.py` converts bodies to prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from saccade.api.body_schema import BodySchema
from saccade.api.chat.fields import ImageFields, NamedCaching, RequestScope
from saccade.front.unread_fields import UnsupportedFields

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_NAME = 256

Name = Annotated[str, Meta(max_length=MAX_NAME)]


class QuestionText(UnsupportedFields, tag_field="type", tag="input_text"):
    """Text in a question."""

    text: str


class QuestionJSON(UnsupportedFields, tag_field="type", tag="input_json"):
    """JSON in a question, which the model reads as text."""

    data: dict[str, Any] | list[dict[str, Any]]
    """JSON, which the model reads as text."""


Instructions = str | list[QuestionText | QuestionJSON]


class PredicateQuestion(UnsupportedFields, tag_field="type", tag="predicate", kw_only=True):
    """The probability that a statement about the input is true."""

    instructions: Instructions
    """The statement: a string, or parts with text and JSON."""
    name: Name | None = None


class Choice(UnsupportedFields, kw_only=True):
    """A value to choose."""

    value: str | bool
    description: str | None = None


class ChoiceQuestion(UnsupportedFields, tag_field="type", tag="choice", kw_only=True):
    """Asks which value fits the input best."""

    instructions: Instructions
    """The question: a string, or parts with text and JSON."""
    choices: Annotated[list[Choice], Meta(min_length=2, max_length=MAX_CHOICES)]
    """The values to choose from."""
    name: Name | None = None


class Level(UnsupportedFields, kw_only=True):
    """A level of a score."""

    label: str
    description: str | None = None


class ScoreQuestion(UnsupportedFields, tag_field="type", tag="score", kw_only=True):
    """Asks which of several ordered levels fits the input best."""

    instructions: Instructions
    """What to rate: a string, or parts with text and JSON."""
    levels: Annotated[list[Level], Meta(min_length=2, max_length=MAX_CHOICES)]
    """The levels of the score, the lowest first."""
    name: Name | None = None


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionInput(Struct, kw_only=True):
    """The input, and the questions about it."""

    input: Raw
    """The input: a string, or items as in /v1/responses."""
    questions: Raw
    """The questions. Each is a predicate, a choice or a score."""


@dataclass(frozen=True, slots=True)
class DecisionsRequest:
    """Body for POST /v1/decisions."""

    asked: DecisionInput
    scope: RequestScope
    caching: NamedCaching
    images: ImageFields


DECISIONS: BodySchema[DecisionsRequest] = BodySchema(DecisionsRequest)
