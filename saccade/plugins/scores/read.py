"""Converts the bodies of embeddings, reranking and scores to prompts.

The number of prompts is checked before any is read. `fields.py` has the fields, and
`front/score_prompts.py` builds the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Raw

from saccade.api.chat.fields import ImageFields
from saccade.core.errors import InvalidRequest
from saccade.core.types import PromptReading
from saccade.front.content import TextPart, message_from_json, read_parts
from saccade.front.conversation import Message, MessageText, Part
from saccade.front.fields import Natural, Reader, missing
from saccade.front.image_parts import ImagePart
from saccade.front.part_defaults import PartDefaults
from saccade.front.read_requests import MAX_TOKENS, ReadRequest, read_request
from saccade.front.score_prompts import Scoring
from saccade.plugins.scores.fields import (
    EMBED,
    EMBEDDINGS,
    MAX_INPUTS,
    RERANK,
    SCORE,
    CohereImage,
    CohereInput,
    EncodingFormat,
    RankForm,
    ScoredContent,
    ScoreScope,
)

_LIST: Reader[list[Raw]] = Reader(list[Raw])
_TEXT: Reader[str] = Reader(str)
_TOKENS: Reader[list[Natural]] = Reader(list[Natural])
_INPUT: Reader[CohereInput] = Reader(CohereInput)
_CONTENT: Reader[ScoredContent] = Reader(ScoredContent)


@dataclass(frozen=True, slots=True)
class EmbedAsked:
    """The prompts to embed.

    formats: the formats of embeddings in the response.
    texts: the inputs to include in the response.
    """

    reads: tuple[ReadRequest, ...]
    model: str | None
    dimensions: int | None
    formats: tuple[EncodingFormat, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankAsked:
    """The prompts of a ranking: pairs of a query and a document, or queries and documents
    separately.

    documents: the documents to include in the response, if requested.
    """

    reads: tuple[ReadRequest, ...]
    model: str | None
    queries: int = 0  # number of queries, which are before the documents; 0: `reads` are pairs
    form: RankForm = RankForm()  # noqa: RUF009 - never changed
    documents: tuple[Any, ...] = ()


def _body_limit(context_length: int) -> int:
    """Return the maximum number of values in a body: the maximum tokens of a prompt."""
    return max(context_length, MAX_TOKENS)


def read_embeddings(scoring: Scoring, body: bytearray, context_length: int) -> EmbedAsked:
    """Parse the body of POST /v1/embeddings. Raises InvalidRequest with the field."""
    request = EMBEDDINGS.read(body, _body_limit(context_length))
    scoring.check_embeds()
    given, scope, form = request.asked, request.scope, request.form
    embed = _Embedder(scoring, scope, request.images)
    if _is_given(given.input) == _is_given(given.messages):
        if _is_given(given.input):
            raise InvalidRequest(
                "input and messages are mutually exclusive: send one of them", "messages"
            )
        raise missing("input")
    chats = _is_given(given.messages)
    reads = embed.chats(given.messages) if chats else embed.inputs(given.input)
    formats: tuple[EncodingFormat, ...] = (form.encoding_format or "float",)
    return EmbedAsked(tuple(reads), scope.model, form.dimensions, formats)


def read_embed(scoring: Scoring, body: bytearray, context_length: int) -> EmbedAsked:
    """Parse the body of POST /v2/embed. Raises InvalidRequest with the field."""
    request = EMBED.read(body, _body_limit(context_length))
    scoring.check_embeds()
    scoring.check_single("/v1/embeddings")
    scope, form = request.scope, request.form
    embed = _Embedder(scoring, scope, request.images, query=form.input_type == "search_query")
    given = {
        name: raw
        for name, raw in msgspec.structs.asdict(request.asked).items()
        if len(memoryview(raw)) > len("[]")
    }
    if len(given) != 1:
        raise InvalidRequest("send exactly one of texts, images and inputs", "inputs")
    ((name, raw),) = given.items()
    items = _items(raw, name)
    texts: tuple[str, ...] = ()
    if name == "texts":
        texts = tuple(_TEXT.json(each, f"texts[{i}]") for i, each in enumerate(items))
        reads = [embed.text(text, f"texts[{i}]") for i, text in enumerate(texts)]
    elif name == "images":
        urls = (_TEXT.json(each, f"images[{i}]") for i, each in enumerate(items))
        reads = [
            embed.parts((ImagePart(image_url=url),), f"images[{i}]") for i, url in enumerate(urls)
        ]
    else:
        reads = [embed.cohere(each, f"inputs[{i}]") for i, each in enumerate(items)]
    formats = tuple(dict.fromkeys(form.embedding_types or ("float",)))
    return EmbedAsked(tuple(reads), scope.model, form.output_dimension, formats, texts)


def read_rerank(scoring: Scoring, body: bytearray, context_length: int) -> RankAsked:
    """Parse the body of POST /rerank. Raises InvalidRequest with the field."""
    request = RERANK.read(body, _body_limit(context_length))
    scoring.check_ranks()
    given, limits = request.asked, request.images.part_defaults(scoring.limits)
    query = _content(given.query, "query", limits), "query"
    items = _items(given.documents, "documents")
    places = [f"documents[{i}]" for i in range(len(items))]
    contents = [
        (_content(each, place, limits), place) for each, place in zip(items, places, strict=True)
    ]
    documents = tuple(map(msgspec.json.decode, items)) if request.form.return_documents else ()
    asked = _ranks(scoring, request.scope, [query], contents)
    return replace(asked, form=request.form, documents=documents)


def read_score(scoring: Scoring, body: bytearray, context_length: int) -> RankAsked:
    """Parse the body of POST /score. Raises InvalidRequest with the field."""
    request = SCORE.read(body, _body_limit(context_length))
    scoring.check_ranks()
    limits = request.images.part_defaults(scoring.limits)
    sides = (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2"))
    read = []
    for names in sides:
        asked = msgspec.structs.asdict(request.asked)
        given = [(name, asked[name]) for name in names if _is_given(asked[name])]
        if len(given) != 1:
            raise InvalidRequest(f"expected one of {', '.join(names)}", names[0])
        ((name, raw),) = given
        single = bytes(memoryview(raw)[:1]) != b"["
        items = [raw] if single else _items(raw, name)
        places = [name] if single else [f"{name}[{i}]" for i in range(len(items))]
        contents = [_content(e, place, limits) for e, place in zip(items, places, strict=True)]
        read.append(list(zip(contents, places, strict=True)))
    first, second = read
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{len(first)} queries do not match {len(second)} documents: send one query, or as "
            "many as documents",
            "text_1",
        )
    return _ranks(scoring, request.scope, first, second)


def _is_given(raw: Raw) -> bool:
    return len(memoryview(raw)) > 0


def _items(raw: Raw, name: str) -> list[Raw]:
    """Return the entries of a list, as JSON. Raises InvalidRequest if it is empty or too long."""
    items = _LIST.json(raw, name)
    if not items:
        raise InvalidRequest(f"{name}: the list must have at least one entry", name)
    if len(items) > MAX_INPUTS:
        raise InvalidRequest(
            f"{name} has {len(items)} entries; the limit is {MAX_INPUTS}: send them in several "
            "requests",
            name,
        )
    return items


_Placed = tuple[tuple[Part, ...], str]
"""A query or a document, and its path in the client's request."""


class _Embedder:
    """Converts inputs to prompts."""

    def __init__(
        self, scoring: Scoring, scope: ScoreScope, images: ImageFields, query: bool = False
    ) -> None:
        self._scoring = scoring
        self._scope = scope
        self._query = query
        self._late = scoring.late
        self._limits = images.part_defaults(scoring.limits)

    def inputs(self, raw: Raw) -> Sequence[ReadRequest]:
        """Convert OpenAI's `input`, in any of its forms, to prompts."""
        if _begins(raw) != "[":
            return [self.text(_TEXT.json(raw, "input"), "input")]
        if _begins(raw, 1) in "0123456789-":
            return [self.tokens(raw, "input")]
        items = _items(raw, "input")
        read: Callable[[Raw, str], ReadRequest] = (
            self._text if _begins(items[0]) == '"' else self.tokens
        )
        return [read(each, f"input[{i}]") for i, each in enumerate(items)]

    def chats(self, raw: Raw) -> Sequence[ReadRequest]:
        """Convert vLLM's `messages`, which are one chat or several, to prompts."""
        items = _items(raw, "messages")
        if _begins(items[0]) != "[":
            return [self._chat(items, "messages")]
        return [
            self._chat(_items(each, at), at)
            for i, each in enumerate(items)
            if (at := f"messages[{i}]")
        ]

    def text(self, text: str, place: str) -> ReadRequest:
        if not text:
            raise InvalidRequest(f"{place}: the text must not be empty", place)
        return self._whole((MessageText(text, place),), self._scope.instruction, place)

    def _text(self, raw: Raw, place: str) -> ReadRequest:
        return self.text(_TEXT.json(raw, place), place)

    def tokens(self, raw: Raw, place: str) -> ReadRequest:
        """Convert a list of tokens to a prompt without a template."""
        tokens = _TOKENS.json(raw, place)
        if not tokens:
            raise InvalidRequest(f"{place}: the list must have at least one entry", place)
        read = read_request if self._late is None else self._late.read_tokens
        return read(tuple(tokens), place, salt=self._scope.salt)

    def parts(self, parts: Sequence[TextPart | ImagePart], place: str) -> ReadRequest:
        return self._whole(read_parts(parts, place, self._limits), self._scope.instruction, place)

    def cohere(self, raw: Raw, place: str) -> ReadRequest:
        """Convert an entry of Cohere's `inputs` to a prompt."""
        content = _INPUT.json(raw, place).content
        parts = [
            ImagePart(image_url=part.image_url)
            if isinstance(part, CohereImage)
            else TextPart(text=part.text)
            for part in content
        ]
        return self.parts(parts, f"{place}.content")

    def _chat(self, items: Sequence[Raw], place: str) -> ReadRequest:
        messages = [
            message_from_json(each, f"{place}[{i}]", self._limits) for i, each in enumerate(items)
        ]
        if messages[-1].role == "assistant" and not messages[-1].content:
            messages.pop()  # clients add it to end the prompt there on another server
        instruction = self._scope.instruction
        if messages and messages[0].role == "system":
            parts = _parts(messages.pop(0))
            instruction = "".join(part.text for part in parts if isinstance(part, MessageText))
        if len(messages) != 1 or messages[0].role != "user":
            raise InvalidRequest(
                f"{place}: expected a user's message, and before it at most a system message with "
                "the instruction",
                place,
            )
        return self._whole(_parts(messages[0]), instruction, place)

    def _whole(self, parts: tuple[Part, ...], instruction: str | None, place: str) -> ReadRequest:
        if self._late is not None:
            return self._late.read(parts, place, self._scope.salt, instruction=instruction)
        chat = self._scoring.embed_chat(parts, instruction, self._query)
        return read_request(chat, place, salt=self._scope.salt)


def _parts(message: Message) -> tuple[Part, ...]:
    if isinstance(message.content, str):
        return (MessageText(message.content, message.place),) if message.content else ()
    return message.parts


def _begins(raw: Raw, at: int = 0) -> str:
    """Return the character at index `at` of a JSON value, not counting white space."""
    seen = bytes(memoryview(raw)[:256]).decode("utf-8", "replace")
    return "".join(seen.split())[at : at + 1] or " "


def _content(raw: Raw, place: str, limits: PartDefaults) -> tuple[Part, ...]:
    if _begins(raw) == '"':
        return read_parts(_TEXT.json(raw, place), place, limits)
    given = _CONTENT.json(raw, place)
    if given.content is not None:
        return read_parts(given.content, f"{place}.content", limits)
    if given.text is None:
        raise missing(f"{place}.content")
    return read_parts(given.text, f"{place}.text", limits)


def _ranks(
    scoring: Scoring, scope: ScoreScope, queries: Sequence[_Placed], documents: Sequence[_Placed]
) -> RankAsked:
    if (late := scoring.late) is not None:
        more: Any = {"salt": scope.salt, "instruction": scope.instruction}
        asked = [late.read(query, place, **more) for query, place in queries]
        pages = [late.read(page, place, **more, page=True) for page, place in documents]
        return RankAsked((*asked, *pages), scope.model, len(asked))
    reading = PromptReading(scoring.labels)
    reads = []
    queries = queries if len(queries) == len(documents) else [queries[0]] * len(documents)
    for (query, _), (document, place) in zip(queries, documents, strict=True):
        chat = scoring.rank_chat(query, document, scope.instruction)
        reads.append(read_request(chat, place, reading, scope.salt))
    return RankAsked(tuple(reads), scope.model)
