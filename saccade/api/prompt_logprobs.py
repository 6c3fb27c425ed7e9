"""Adds prompts to responses: their text (`echo`), and the log-probabilities of their tokens
(`prompt_logprobs`, and `logprobs` with `echo`).

Log-probabilities stay packed until they are sent, because as JSON they take ten times the memory.
They are encoded in chunks, because encoding them at once would block the event loop.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec import UNSET, Raw, structs

from saccade.api.chat.write import (
    ChatChoice,
    Completion,
    CompletionLogprobs,
    PromptLogprob,
    TextChoice,
    TokenCount,
    by_text,
)
from saccade.api.stream import MARK, Choices, StreamedBody
from saccade.core.errors import InvalidRequest, RequestError
from saccade.core.types import PromptScores
from saccade.front.answer_update import AnswerUpdate
from saccade.front.conversation import Chat
from saccade.front.input_processor import InputProcessor
from saccade.front.prepared import PreparedRequest
from saccade.front.prompt_encoder import GenerationRequest
from saccade.text.answer.detokenize import Vocabulary

MAX_PROMPT_SCORES = 1 << 20
"""Maximum number of log-probabilities of prompt tokens in one response, which are about 70 MB of
JSON.
"""
_SCORE_BYTES = 8
_PIECE = 2048
"""Number of log-probabilities in a chunk. Encoding one takes a few ms in a thread."""


def score_bytes(prepared: Sequence[PreparedRequest]) -> int:
    """Return the memory that the log-probabilities of these prompts take until they are sent, in
    bytes.

    Raises InvalidRequest if there are too many.
    """
    values = 0
    for each in prepared:
        top = each.request.prompt_logprobs
        if top is not None:
            values += each.n * len(each.request.tokens) * (1 + top)
    if values > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"prompt_logprobs: prompt tokens x (prompt_logprobs + 1) x n is {values} "
            f"log-probabilities, more than {MAX_PROMPT_SCORES}: request fewer log-probabilities "
            "per token, or send shorter prompts",
            "prompt_logprobs",
        )
    return _SCORE_BYTES * values


def texts_of(requests: Sequence[GenerationRequest], intake: InputProcessor) -> list[str]:
    """Return the text to echo for each prompt. Prompts that are token ids are decoded. Chats are
    left out.
    """
    most = intake.spec.vocab_size  # other tokens are rejected later
    return [
        request.prompt
        if isinstance(request.prompt, str)
        else intake.tokenizer.decode([token for token in request.prompt if token < most])
        for request in requests
        if not isinstance(request.prompt, Chat)
    ]


@dataclass(frozen=True, slots=True)
class PromptView:
    """Which parts of its prompts a response contains."""

    texts: Sequence[str] = ()  # text of each prompt, if echoed
    # number of likeliest tokens for each echoed token; None: no log-probabilities
    echoed: int | None = None
    top: int | None = None  # number of likeliest tokens in `prompt_logprobs`; None: not requested


def scroll_count(count: TokenCount, name: Callable[[int], str] | None) -> StreamedBody:
    """Return the response body for `count`, encoded in chunks.

    name: returns the text of a token id. If None, the body has no `token_strs`.
    """
    runs = [in_pieces(iter(count.tokens), _PIECE)]
    if name is not None:
        runs.append(in_pieces(map(name, count.tokens), _PIECE))
    tokens, strings = (stands_for(index) for index in range(2))
    return StreamedBody(
        structs.replace(count, tokens=tokens, token_strs=UNSET if name is None else strings), runs
    )


class PromptTeller:
    """A `ResponseWriter` that writes answers with `inner`, and adds the parts of the prompts that
    `view` specifies.
    """

    def __init__(
        self,
        inner: Choices,
        view: PromptView,
        prepared: Sequence[PreparedRequest],
        vocabulary: Vocabulary,
    ) -> None:
        self._inner = inner
        self._view = view
        self._n = prepared[0].n
        self._begun = set[int]()
        self._prompts = [ScoredPrompt(each.request.tokens, vocabulary) for each in prepared]
        self._runs: list[Iterator[bytes]] = []

    def shown(self, event: AnswerUpdate) -> bytes:
        return b"".join(map(self._inner.shown, self._opened(event)))

    def ending(self) -> bytes:
        return self._inner.ending()

    def failure(self, error: RequestError) -> bytes:
        return self._inner.failure(error)

    def keep_update(self, event: AnswerUpdate) -> None:
        if event.scores is not None:
            self._prompts[event.choice // self._n].scores.append(event.scores)
            return
        for each in self._opened(event):
            self._inner.keep_update(each)

    def whole(self) -> Completion | StreamedBody:
        completion = self._inner.whole()
        choices = [
            self._with_prompt(choice) if isinstance(choice, TextChoice) else choice
            for choice in completion.choices
        ]
        completion = structs.replace(completion, choices=choices)
        if self._view.top is not None and isinstance(choices[0], ChatChoice):
            entries = self._later(self._prompts[0].entries(self._view.top))
            completion = structs.replace(completion, prompt_logprobs=entries)
        return StreamedBody(completion, self._runs) if self._runs else completion

    def _opened(self, event: AnswerUpdate) -> Iterable[AnswerUpdate]:
        if self._view.texts and event.choice not in self._begun:
            self._begun.add(event.choice)
            yield AnswerUpdate(event.choice, self._view.texts[event.choice // self._n])
        yield event

    def _with_prompt(self, choice: TextChoice) -> TextChoice:
        index, view = choice.index // self._n, self._view
        prompt = self._prompts[index]
        if view.top is not None:
            choice = structs.replace(choice, prompt_logprobs=self._later(prompt.entries(view.top)))
        own = choice.logprobs
        if view.echoed is None or own is None:
            return choice
        length = len(view.texts[index])
        logprobs = CompletionLogprobs(
            self._later(prompt.names()) + own.tokens,
            self._later(prompt.logprobs()) + own.token_logprobs,
            self._later(prompt.alternatives(view.echoed)) + own.top_logprobs,
            self._later(prompt.offsets(length)) + [length + offset for offset in own.text_offset],
        )
        return structs.replace(choice, logprobs=logprobs)

    def _later(self, run: Iterator[bytes]) -> list[Any]:
        self._runs.append(run)
        return stands_for(len(self._runs) - 1)


class ScoredPrompt:
    """One prompt's tokens, and their packed log-probabilities.

    Each method yields chunks of JSON for the items of a list with one entry per token. The first
    token has no log-probability.
    """

    def __init__(self, tokens: Sequence[int], vocabulary: Vocabulary) -> None:
        self.scores: list[PromptScores] = []
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._name = vocabulary.name_of

    def names(self) -> Iterator[bytes]:
        return in_pieces((_text(self._name(token)) for token in self._tokens), _PIECE)

    def offsets(self, length: int) -> Iterator[bytes]:
        """Yield the offset of each token in the prompt's text, which has `length` characters."""

        def offsets() -> Iterator[int]:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            offset = 0
            for token in self._tokens:
                yield min(offset, length)
                offset += len(decoder.decode(self._name(token)))

        return in_pieces(offsets(), _PIECE)

    def logprobs(self) -> Iterator[bytes]:
        found = (logprobs[0] for _, logprobs, _ in self._read())
        return in_pieces(chain((None,), found, self._missing()), _PIECE)

    def alternatives(self, top: int) -> Iterator[bytes]:
        """Yield the `top` likeliest tokens at each position by text, in the format of OpenAI's
        completions.
        """
        found = (
            by_text(zip(ids[1:], logprobs[1 : 1 + top]), self._vocabulary)
            for ids, logprobs, _ in self._read()
        )
        return in_pieces(chain((None,), found, self._missing()), _PIECE // (1 + top))

    def entries(self, top: int) -> Iterator[bytes]:
        """Yield each token of the prompt and the `top` likeliest tokens at its position by id, in
        vLLM's format.
        """

        def entry(ids: list[int], logprobs: list[float], rank: int) -> dict[int, PromptLogprob]:
            found: dict[int, PromptLogprob] = {}
            for id, logprob, place in zip(ids, logprobs, (rank, *range(1, top + 1))):
                if id not in found:  # the prompt's token may also be one of the likeliest
                    found[id] = PromptLogprob(logprob, place, _text(self._name(id)))
            return found

        found = (entry(*each) for each in self._read())
        return in_pieces(chain((None,), found, self._missing()), _PIECE // (1 + top))

    def _missing(self) -> Iterator[None]:
        """Yield None for each of the last tokens whose log-probabilities were not computed, because
        the answer can only be empty.
        """
        yield from [None] * (len(self._tokens) - 1 - sum(each.count for each in self.scores))

    def _read(self) -> Iterator[tuple[list[int], list[float], int]]:
        for each in self.scores:
            for start in range(0, each.count, _PIECE // 16):
                yield from each.rows(start, start + _PIECE // 16)


def stands_for(run: int) -> list[Any]:
    """Return a list that contains only a marker, which `StreamedBody` replaces with the items of
    run `run`.
    """
    return [Raw(b"%b%d%b" % (MARK, run, MARK))]


def in_pieces(entries: Iterator[object], size: int) -> Iterator[bytes]:
    """Encode `entries` as the items of a JSON list, in chunks of `size` items."""
    before = b""
    while part := list(islice(entries, size)):
        yield before + msgspec.json.encode(part)[1:-1]
        before = b","


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
