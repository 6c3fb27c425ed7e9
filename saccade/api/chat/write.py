"""The response bodies of OpenAI's API: answers, chunks, usage and models."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from saccade.api.trace.image_trace import ImageCost, Trace, tiers_of
from saccade.core.types import CacheMiss, CacheMissReason, DraftCounts, Tier, TokenLogprobs
from saccade.front.answer_update import NOTHING_AHEAD, AnswerUpdate, Finish
from saccade.front.prepared import PreparedRequest
from saccade.text.answer.detokenize import Vocabulary
from saccade.text.answer.events import (
    AnswerEvent,
    CallArguments,
    CallEnded,
    CallStarted,
    Reasoned,
    Text,
)
from saccade.text.answer.reader import gather


class PromptTokensDetails(Struct):
    """The prompt's tokens: from the cache, newly pinned by a cache breakpoint, in images, and in
    videos.
    """

    cached_tokens: int
    cache_write_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int | UnsetType = UNSET
    """Tokens that represent videos. Absent without videos."""
    cached_tokens_by_tier: dict[Tier, int] | UnsetType = UNSET
    """Where the cached tokens were: device, host, disk. Absent if all were on the device."""
    prepared_tokens: int | UnsetType = UNSET
    """Cached tokens that were computed before the request arrived, because the server had learned
    how the client shortens its prompts. Absent if 0.
    """
    prepared_in_vain_tokens: int | UnsetType = UNSET
    """Tokens that were computed before the request arrived, but were not used. Absent if 0."""

    @property
    def beside(self) -> dict[str, Any]:
        """The optional fields that are set."""
        told = {
            "cached_tokens_by_tier": self.cached_tokens_by_tier,
            "prepared_tokens": self.prepared_tokens,
            "prepared_in_vain_tokens": self.prepared_in_vain_tokens,
        }
        return {name: value for name, value in told.items() if value}


class CompletionTokensDetails(Struct):
    """Accepted and rejected draft tokens. They never change the answer."""

    accepted_prediction_tokens: int
    """Draft tokens that the model accepted. Drafts save time and never change an answer."""
    rejected_prediction_tokens: int
    """Draft tokens that the model rejected. Other counts leave them out."""


class Usage(Struct):
    """The token counts of one request. The prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens in all answers."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """How many completion tokens were draft tokens. Absent without drafts."""


class TopLogprob(Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """A token of the answer, its log-probability, and the likeliest tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat's answer: an encoded `TokenLogprob` for each token."""

    content: list[Raw]
    """One entry per token: text, bytes and the likeliest others."""
    refusal: None = None
    """Always null. This server's answers are never refusals."""


class PromptLogprob(Struct):
    """The model's score for a prompt token, in vLLM's format."""

    logprob: float
    """The natural logarithm of the token's probability."""
    rank: int
    """1 for the likeliest token at this place."""
    decoded_token: str
    """The token as text."""


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of the prompt, the log-probabilities of that token and of the likeliest tokens, by
token id. None for the first token.
"""


class CompletionLogprobs(Struct):
    """Log-probabilities of a text completion, as parallel lists.

    The tokens of an echoed prompt come first. The log-probability of its first token is null.
    """

    tokens: list[str]
    """The text of each token."""
    token_logprobs: list[float | None]
    """The log-probability of each token."""
    top_logprobs: list[Raw]
    """The likeliest tokens at each place, by text."""
    text_offset: list[int]
    """Where each token begins in the text, in characters."""


Logprobs = ChatLogprobs | CompletionLogprobs
ChatFinish = Finish | Literal["tool_calls"]


class FunctionReply(Struct):
    """The called function. Its arguments are JSON text."""

    name: str
    arguments: str


class CallReply(Struct):
    """An entry of `tool_calls`."""

    id: str
    function: FunctionReply
    type: str = "function"


class AnswerMessage(Struct):
    """The assistant's message."""

    content: str | None
    """The answer's text. Null if the answer has only calls."""
    role: str = "assistant"
    refusal: None = None
    """Always null. This server's answers are never refusals."""
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """reasoning_content under its newer name."""
    tool_calls: list[CallReply] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer of a chat completion."""

    index: int
    message: AnswerMessage
    finish_reason: ChatFinish
    logprobs: ChatLogprobs | None = None


class FunctionDelta(Struct):
    """The called function's name, or a part of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """A chunk's addition to the call `index`: first its id and name, then its arguments in
    parts.
    """

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AnswerDelta(Struct):
    """A chunk's addition to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    """The part of a chunk that belongs to one answer."""

    index: int
    delta: AnswerDelta
    finish_reason: ChatFinish | None = None
    logprobs: ChatLogprobs | None = None


class TextChoice(Struct):
    """One answer of a text completion, or its part of a chunk."""

    index: int
    text: str
    """The answer's text."""
    finish_reason: Finish | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Each prompt token and the likeliest tokens at its place, by token id. The first is null."""


class MissReason(Struct):
    """Why the cache held less of the prompt than it could, and from where on. See
    `core/types.CacheMissReason`.
    """

    type: CacheMissReason
    """Why the cache missed. An earlier prompt continued differently, an image changed size, or the
    cached data was evicted.
    """
    place: str
    """The part of the request where the difference begins."""
    cache_missed_tokens: int
    """Prompt tokens from that place on."""


class CacheDiagnostics(Struct):
    """Why the caches did not contain more of a prompt, compared with earlier prompts."""

    cache_miss_reason: MissReason | None
    """Null if the cache held everything that earlier prompts contain."""

    @classmethod
    def of(cls, missed: CacheMiss | None) -> CacheDiagnostics:
        if missed is None:
            return cls(None)
        return cls(MissReason(missed.reason, missed.place, missed.tokens))


class Completion(Struct):
    """A response or a chunk, of a chat or a text completion.

    Chunks have `usage` only if the client requested it. It is then null in all chunks except the
    last.
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice | ChunkChoice | TextChoice]
    usage: Usage | UnsetType | None = UNSET
    saccade: Trace | UnsetType = UNSET
    diagnostics: CacheDiagnostics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Model(Struct):
    """An entry of the model list."""

    id: str
    created: int
    max_model_len: int | UnsetType = UNSET
    object: str = "model"
    owned_by: str = "saccade"
    """Always saccade."""
    parent: str | UnsetType = UNSET
    """For an adapter, the model that it modifies."""
    unproven: bool | UnsetType = UNSET
    """True if no test compares this architecture's answers with transformers' own."""


class ModelList(Struct):
    """The response of GET /v1/models."""

    data: list[Model]
    """The models."""
    object: str = "list"


class TokenCount(Struct):
    """The response of POST /tokenize: the size of a prompt, and of each image."""

    count: int
    """Tokens in the prompt."""
    max_model_len: int
    tokens: Sequence[int]
    """Token ids."""
    images: Sequence[ImageCost]
    """The images and their costs."""
    token_strs: Sequence[str] | UnsetType = UNSET
    """The text of each token, if the request asks for it."""


class TokenText(Struct):
    """The response of POST /detokenize."""

    prompt: str
    """The text of the tokens."""


class ChoiceReply:
    """Collects the updates of one choice for a response that is not streamed.

    Log-probabilities are encoded as they arrive, because encoding all of them at once would block
    the event loop.
    """

    def __init__(self, shape: Shape, choice: int) -> None:
        self.texts: list[str] = []
        self.parts: list[AnswerEvent] = []
        self.finish: Finish | None = None
        self.logprobs: list[Logprobs] = []
        self._shape = shape
        self._choice = choice

    def add_update(self, event: AnswerUpdate) -> None:
        self.texts.append(event.text)
        self.parts += event.parts
        self.finish = event.finish
        logprobs = self._shape.logprobs(self._choice, event.logprobs)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class UsageCounter:
    """Counts tokens for `usage`.

    A prompt counts once, whatever `n` is. Its cached tokens are counted when its first answer
    starts.
    """

    def __init__(
        self, prompt_tokens: int, n: int, image_tokens: int = 0, video_tokens: int = 0
    ) -> None:
        self.written: Counter[int] = Counter()  # newly pinned tokens, by seconds
        self.missed: CacheMiss | None = None  # if the request asked for diagnostics
        self._prompt = prompt_tokens
        self._images = image_tokens
        self._videos = video_tokens or UNSET
        self._n = n
        self._completion = 0
        self._cached = 0
        self._restored: Counter[Tier] = Counter()
        self._draft_counts: dict[int, tuple[DraftCounts, ...]] = {}
        self._ahead = NOTHING_AHEAD

    def add_update(self, event: AnswerUpdate) -> None:
        self._completion += event.num_tokens
        if event.draft_counts:
            self._draft_counts[event.choice] = event.draft_counts
        if event.ahead is not None:
            self._ahead = event.ahead
        if event.choice % self._n == 0:
            self._cached += event.cached.total
            self._restored.update(dict(event.cached.restored))
            if event.caching is not None:
                self.written.update(dict(event.caching.written))
                self.missed = self.missed or event.caching.missed

    @classmethod
    def of(cls, prepared: Sequence[PreparedRequest]) -> UsageCounter:
        """Create a counter for these requests, with the tokens of their prompts."""
        prompt = sum([len(each.request.tokens) for each in prepared])
        shown = [each for each in prepared if each.opened]
        images = sum([each.shown_tokens(video=False) for each in shown])
        videos = sum([each.shown_tokens(video=True) for each in shown])
        return cls(prompt, prepared[0].n, images, videos)

    @property
    def usage(self) -> Usage:
        draft_counts = [each for told in self._draft_counts.values() for each in told]
        return Usage(
            self._prompt,
            self._completion,
            self._prompt + self._completion,
            PromptTokensDetails(
                self._cached,
                self.written.total(),
                self._images,
                self._videos,
                tiers_of(self._cached, self._restored.items()) if self._restored else UNSET,
                self._ahead.used or UNSET,
                self._ahead.prepared - self._ahead.used or UNSET,
            ),
            CompletionTokensDetails(
                sum(each.right for each in draft_counts), sum(each.wrong for each in draft_counts)
            )
            if draft_counts
            else UNSET,
        )


class Shape(Protocol):
    """Converts answers to the format of one of OpenAI's two APIs."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, choice: int) -> ChunkChoice | None:
        """Return the chunk that precedes the text of a choice, or None if the format has none."""
        ...

    def logprobs(self, choice: int, tokens: Sequence[TokenLogprobs], /) -> Logprobs | None:
        """Return log-probabilities of `tokens` in the API's format, or None if they were not
        requested.

        Call this once for each token, in order.
        """
        ...

    def chunks(self, event: AnswerUpdate) -> Sequence[ChunkChoice | TextChoice]:
        """Return the choices to stream for one update, in order."""
        ...

    def whole(self, choice: int, answer: ChoiceReply) -> ChatChoice | TextChoice: ...


class ChatShape:
    """Converts answers to the format of chat completions.

    logprobs: the client requested log-probabilities.
    tools: the client sent tools.
    reasoning: the answer shows the reasoning.

    An instance records which choices have called a tool, for `finish_reason`.
    """

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, vocabulary: Vocabulary, logprobs: bool, tools: bool = False, reasoning: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._wanted = logprobs
        self._empty = None if tools else ""
        self._reasoning = reasoning
        self._called = set[int]()

    def opening(self, choice: int) -> ChunkChoice | None:
        return ChunkChoice(choice, AnswerDelta(role="assistant", content=self._empty))

    def chunks(self, event: AnswerUpdate) -> list[ChunkChoice]:
        deltas = [delta for part in event.parts if (delta := self._delta(event.choice, part))]
        logprobs = self.logprobs(event.choice, event.logprobs)
        if not deltas and (event.logprobs or event.finish):
            deltas = [AnswerDelta(content="") if event.logprobs else AnswerDelta()]
        choices = [ChunkChoice(event.choice, delta) for delta in deltas]
        if choices:
            choices[0].logprobs = logprobs
            choices[-1].finish_reason = self._finish(event.choice, event.finish)
        return choices

    def _delta(self, choice: int, part: AnswerEvent) -> AnswerDelta | None:
        match part:
            case Text(text):
                return AnswerDelta(content=text)
            case Reasoned(text) if self._reasoning:
                return AnswerDelta(reasoning_content=text, reasoning=text)
            case CallStarted(index, call_id, name):
                begun = CallDelta(index, FunctionDelta("", name), call_id, "function")
                return AnswerDelta(tool_calls=[begun])
            case CallArguments(index, text):
                return AnswerDelta(tool_calls=[CallDelta(index, FunctionDelta(text))])
            case CallEnded():
                self._called.add(choice)
        return None

    def _finish(self, choice: int, finish: Finish | None) -> ChatFinish | None:
        return "tool_calls" if finish == "stop" and choice in self._called else finish

    def whole(self, choice: int, answer: ChoiceReply) -> ChatChoice:
        assert answer.finish is not None
        entries = [
            entry
            for part in answer.logprobs
            if isinstance(part, ChatLogprobs)
            for entry in part.content
        ]
        logprobs = ChatLogprobs(entries) if self._wanted else None
        read = gather(answer.parts)
        message = AnswerMessage(read.text)
        if read.calls:
            message.content = read.text or None
            message.tool_calls = [
                CallReply(call.id, FunctionReply(call.name, call.arguments)) for call in read.calls
            ]
        if read.reasoning and self._reasoning:
            message.reasoning_content = message.reasoning = read.reasoning
        called = any(isinstance(part, CallEnded) for part in answer.parts)
        finish = "tool_calls" if called and answer.finish == "stop" else answer.finish
        return ChatChoice(choice, message, finish, logprobs)

    def logprobs(self, _: int, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._wanted:
            return None
        name = self._vocabulary.name_of

        def alternative(token: int, logprob: float) -> TopLogprob:
            return TopLogprob(_text(name(token)), logprob, list(name(token)))

        return ChatLogprobs(
            [
                _as_json(
                    TokenLogprob(
                        _text(name(t.token)),
                        t.logprob,
                        list(name(t.token)),
                        [alternative(token, logprob) for token, logprob in t.top],
                    )
                )
                for t in tokens
            ]
        )


class TextShape:
    """Converts answers to the format of text completions.

    An instance counts the characters of each choice's tokens, for `text_offset`.
    """

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, vocabulary: Vocabulary, logprobs: bool) -> None:
        self._vocabulary = vocabulary
        self._wanted = logprobs
        self._offsets: dict[int, int] = {}

    def opening(self, choice: int) -> None: ...

    def chunks(self, event: AnswerUpdate) -> list[TextChoice]:
        logprobs = self.logprobs(event.choice, event.logprobs)
        if not (event.text or event.logprobs or event.finish):
            return []
        return [TextChoice(event.choice, event.text, event.finish, logprobs)]

    def whole(self, choice: int, answer: ChoiceReply) -> TextChoice:
        logprobs = CompletionLogprobs([], [], [], []) if self._wanted else None
        for part in answer.logprobs:
            if isinstance(part, CompletionLogprobs) and logprobs is not None:
                logprobs.tokens += part.tokens
                logprobs.token_logprobs += part.token_logprobs
                logprobs.top_logprobs += part.top_logprobs
                logprobs.text_offset += part.text_offset
        return TextChoice(choice, answer.text, answer.finish, logprobs)

    def logprobs(self, choice: int, tokens: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        if not self._wanted:
            return None
        name = self._vocabulary.name_of
        offset, offsets, names = (
            self._offsets.get(choice, 0),
            [],
            [_text(name(t.token)) for t in tokens],
        )
        for each in names:
            offsets.append(offset)
            offset += len(each)
        self._offsets[choice] = offset
        top = [_as_json(by_text(t.top, self._vocabulary)) for t in tokens]
        return CompletionLogprobs(names, [t.logprob for t in tokens], top, offsets)


def by_text(top: Iterable[tuple[int, float]], vocabulary: Vocabulary) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens `top` by the tokens' text, the likeliest
    first.

    Several tokens may have the same text: tokens that contain only part of a character have an
    empty text. Of tokens with the same text, only the likeliest is returned.
    """
    found: dict[str, float] = {}
    for token, logprob in top:
        found.setdefault(_text(vocabulary.name_of(token)), logprob)
    return found


def _as_json(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


class Writer:
    """Builds the body, or the chunks, of one response, with its id, time and model name."""

    def __init__(self, shape: Shape, model: str) -> None:
        self.shape = shape
        self._id = shape.id_prefix + secrets.token_hex(12)
        self._created = int(time.time())
        self._model = model

    def whole(
        self,
        answers: Sequence[ChoiceReply],
        usage: Usage,
        trace: Trace | UnsetType,
        diagnostics: CacheDiagnostics | UnsetType = UNSET,
    ) -> Completion:
        choices = [self.shape.whole(i, answer) for i, answer in enumerate(answers)]
        head = self._id, self.shape.object, self._created, self._model
        return Completion(*head, choices, usage, trace, diagnostics)

    def chunk(
        self,
        choices: Sequence[ChunkChoice | TextChoice],
        usage: Usage | UnsetType | None,
        trace: Trace | UnsetType = UNSET,
        diagnostics: CacheDiagnostics | UnsetType = UNSET,
    ) -> Completion:
        head = self._id, self.shape.chunk_object, self._created, self._model
        return Completion(*head, choices, usage, trace, diagnostics)
