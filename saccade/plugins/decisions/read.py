"""Builds the prompts for POST /v1/decisions: one per question, all starting with the input.

A prompt is the input as a conversation, followed by one question, which is answered with one label.
It does not depend on the other questions. This module also selects the tokens that serve as labels.
`fields.py` has the fields.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from string import ascii_lowercase, ascii_uppercase

import msgspec

from saccade.core.errors import InvalidRequest
from saccade.core.types import FieldNames, PromptReading
from saccade.front.content import check_lengths
from saccade.front.conversation import Chat, Message, MessageText
from saccade.front.fields import Reader, unsupported
from saccade.front.part_defaults import PartDefaults
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.read_requests import SharedReadRequest
from saccade.plugins.decisions.fields import (
    DECISIONS,
    MAX_QUESTIONS,
    ChoiceQuestion,
    Instructions,
    PredicateQuestion,
    Question,
    QuestionText,
    ScoreQuestion,
)
from saccade.plugins.responses.items import ItemReader, MessageItem, ReferenceItem, read_items

_LIST: Reader[list[msgspec.Raw]] = Reader(list[msgspec.Raw])
_TEXT: Reader[str] = Reader(str)
_QUESTION: Reader[Question] = Reader(Question)
_NAMES = FieldNames({"messages": "input", "prompt": "input"})

TRUTH = ("Yes", "No")
"""The labels of a predicate's two answers."""
LETTERS = (*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2)), *ascii_lowercase)
"""The labels of choices and levels, in order. Those that are not a single token are skipped."""


@dataclass(frozen=True, slots=True)
class DecisionsAsked:
    """The prompts and questions in a body."""

    shared: SharedReadRequest
    questions: tuple[Question, ...]
    model: str | None


Encode = Callable[[str], list[int]]


def read_decisions(encode: Encode, body: bytearray, context_length: int) -> DecisionsAsked:
    """Read the prompts in a body. Raises InvalidRequest.

    encode: tokenizes a string.
    """
    given = DECISIONS.read(body, context_length)
    asked, scope = given.asked, given.scope
    defaults = given.images.part_defaults()
    raws = _LIST.json(asked.questions, "questions")
    if not 1 <= len(raws) <= MAX_QUESTIONS:
        raise InvalidRequest(
            f"questions: expected from 1 to {MAX_QUESTIONS}, got {len(raws)}", "questions"
        )
    questions = tuple(_question(raw, f"questions[{i}]") for i, raw in enumerate(raws))
    labels = _Labels(encode)
    tails = tuple(
        _tail(question, labels, f"questions[{i}]") for i, question in enumerate(questions)
    )
    mark = secrets.token_hex(16)
    chat = Chat(_closed(_messages(asked.input, defaults, context_length), mark), thinks=False)
    cache = given.caching.cache_request
    if cache.prewarm:
        raise unsupported("prompt_cache_options.prewarm")
    request = GenerationRequest(chat, cache_salt=scope.salt, cache=cache, names=_NAMES)
    shared = SharedReadRequest(request, mark, tails, "input", "questions")
    return DecisionsAsked(shared, questions, scope.model)


def _messages(raw: msgspec.Raw, defaults: PartDefaults, context_length: int) -> tuple[Message, ...]:
    reader = ItemReader(defaults)
    if bytes(memoryview(raw)[:1]) != b"[":
        item = MessageItem(role="user", content=_TEXT.json(raw, "input"))
        reader.add_item(item, "input", "input")
        return reader.messages
    raws = _LIST.json(raw, "input")
    check_lengths(raws, context_length, "input")
    for index, each in enumerate(raws):
        place = f"input[{index}]"
        for found in read_items(each, place):
            if isinstance(found.item, ReferenceItem | bytes):
                raise InvalidRequest(
                    f"{place}: references to earlier responses are not supported", place
                )
            reader.add_item(found.item, place, found.where)
    if not reader.messages:
        raise InvalidRequest("input: the list must have at least one message", "input")
    return reader.messages


def _closed(messages: tuple[Message, ...], mark: str) -> tuple[Message, ...]:
    """Append a placeholder for the question to the last message if it is the user's, or else in a
    new message.
    """
    *before, last = messages
    place = MessageText(mark, last.place)
    if last.role != "user":
        return (*messages, Message("user", (place,), place=last.place))
    own = last.parts or (MessageText(last.content or "", last.place),)  # type: ignore[arg-type]
    return (*before, replace(last, content=(*own, MessageText("\n\n", last.place), place)))


def _question(raw: msgspec.Raw, place: str) -> Question:
    question = _QUESTION.json(raw, place)
    if isinstance(question, ChoiceQuestion):
        named = [(type(each.value), each.value) for each in question.choices]
        field = "choices"
    elif isinstance(question, ScoreQuestion):
        named, field = [(str, each.label) for each in question.levels], "levels"
    else:
        return question
    if len(set(named)) < len(named):
        raise InvalidRequest(
            f"{place}.{field}: the entries must differ from each other", f"{place}.{field}"
        )
    return question


class _Labels:
    """Finds labels that are single tokens."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._letters: list[tuple[str, int]] = []
        self._tried = 0

    def truth(self, place: str) -> tuple[int, ...]:
        found = [self._encode(word) for word in TRUTH]
        if found[0][:1] == found[1][:1]:
            raise InvalidRequest(
                f"{place}: this model's tokenizer does not distinguish Yes from No", place
            )
        return tuple(tokens[0] for tokens in found)

    def letters(self, count: int, place: str) -> list[tuple[str, int]]:
        """Return `count` labels with their tokens. Raises InvalidRequest if there are not
        enough.
        """
        while len(self._letters) < count and self._tried < len(LETTERS):
            label = LETTERS[self._tried]
            self._tried += 1
            if len(tokens := self._encode(label)) == 1:
                self._letters.append((label, tokens[0]))
        if len(self._letters) < count:
            raise InvalidRequest(
                f"{place}: {count} answers; this model's tokenizer has labels for "
                f"{len(self._letters)}",
                place,
            )
        return self._letters[:count]


def _tail(question: Question, labels: _Labels, place: str) -> tuple[str, PromptReading]:
    """Return the text of a question, and the labels of its answers.

    The text starts with the part that all questions of this type have in common, so that this part
    is computed once.
    """
    instructions = _as_text(question.instructions)
    if isinstance(question, PredicateQuestion):
        text = (
            f"Is this statement true? Answer with one word, Yes or No.\nStatement: {instructions}"
        )
        return text, PromptReading(labels.truth(place))
    if isinstance(question, ChoiceQuestion):
        options = [(_value(each.value), each.description) for each in question.choices]
        asked = "Which of the options fits best? Answer with its label alone."
    else:
        options = [(each.label, each.description) for each in question.levels]
        asked = "Which of the levels, the lowest first, fits best? Answer with its label alone."
    letters = labels.letters(len(options), place)
    lines = [
        f"{label}: {name}" + (f" ({description})" if description else "")
        for (label, _), (name, description) in zip(letters, options, strict=True)
    ]
    text = "\n".join((asked, instructions, *lines))
    return text, PromptReading(tuple(token for _, token in letters))


def _value(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _as_text(instructions: Instructions) -> str:
    if isinstance(instructions, str):
        return instructions
    texts: Sequence[str] = [
        part.text if isinstance(part, QuestionText) else msgspec.json.encode(part.data).decode()
        for part in instructions
    ]
    return "\n".join(texts)
