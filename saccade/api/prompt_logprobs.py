"""Prompts shown in answers: their text (`echo`), and the model's scores for their tokens
(`prompt_logprobs`, and `logprobs` beside `echo`).

Owns the shapes, and the writing of long prompts. Scores stay packed until sent, piece by piece,
since as JSON they take ten times the memory and stall the loop.
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
"""Log-probabilities of prompt tokens that one request may have written: about 70 MB of JSON."""
_SCORE_BYTES = 8
_PIECE = 2048
"""Log-probabilities that are written at a time: some ms of a thread."""


def score_bytes(prepared: Sequence[PreparedRequest]) -> int:
    """Return the bytes that these prompts' scores hold until sent. Raises InvalidRequest for too
    many.
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
    """Return each prompt's echo: the given text, or its tokens' text."""
    most = intake.spec.vocab_size  # a token beyond is refused later
    return [
        request.prompt
        if isinstance(request.prompt, str)
        else intake.tokenizer.decode([token for token in request.prompt if token < most])
        for request in requests
        if not isinstance(request.prompt, Chat)
    ]


@dataclass(frozen=True, slots=True)
class PromptView:
    """How a client sees its prompts. `texts`: each prompt's own, if echoed. `echoed`: likeliest
    tokens beside each echoed token, `top`: those of `prompt_logprobs`; None: without
    log-probabilities.
    """

    texts: Sequence[str] = ()
    echoed: int | None = None
    top: int | None = None


def scroll_count(count: TokenCount, name: Callable[[int], str] | None) -> StreamedBody:
    """Return `count` with its tokens written piece by piece, and their strings from `name` beside
    them.
    """
    runs = [in_pieces(iter(count.tokens), _PIECE)]
    if name is not None:
        runs.append(in_pieces(map(name, count.tokens), _PIECE))
    tokens, strings = (stands_for(index) for index in range(2))
    return StreamedBody(
        structs.replace(count, tokens=tokens, token_strs=UNSET if name is None else strings), runs
    )


class PromptTeller:
    """A `ResponseWriter` that writes answers with `inner`, and each answer's prompt as
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
    """One prompt's tokens, and their scores in packed form. Its methods write an entry per token,
    as pieces of JSON that follow each other in a list. The first token lacks a score.
    """

    def __init__(self, tokens: Sequence[int], vocabulary: Vocabulary) -> None:
        self.scores: list[PromptScores] = []
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._name = vocabulary.name_of

    def names(self) -> Iterator[bytes]:
        return in_pieces((_text(self._name(token)) for token in self._tokens), _PIECE)

    def offsets(self, length: int) -> Iterator[bytes]:
        """Yield each token's offset in the prompt's text, which has `length` characters."""

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
        """Yield the `top` likeliest tokens by their text, in the form of OpenAI's completions."""
        found = (
            by_text(zip(ids[1:], logprobs[1 : 1 + top]), self._vocabulary)
            for ids, logprobs, _ in self._read()
        )
        return in_pieces(chain((None,), found, self._missing()), _PIECE // (1 + top))

    def entries(self, top: int) -> Iterator[bytes]:
        """Yield the token and the `top` likeliest by their ids, in vLLM's form."""

        def entry(ids: list[int], logprobs: list[float], rank: int) -> dict[int, PromptLogprob]:
            found: dict[int, PromptLogprob] = {}
            for id, logprob, place in zip(ids, logprobs, (rank, *range(1, top + 1))):
                if id not in found:  # it may be one of the likeliest itself
                    found[id] = PromptLogprob(logprob, place, _text(self._name(id)))
            return found

        found = (entry(*each) for each in self._read())
        return in_pieces(chain((None,), found, self._missing()), _PIECE // (1 + top))

    def _missing(self) -> Iterator[None]:
        """Yield entries for the last tokens, which are left uncomputed if the answer can only be
        empty.
        """
        yield from [None] * (len(self._tokens) - 1 - sum(each.count for each in self.scores))

    def _read(self) -> Iterator[tuple[list[int], list[float], int]]:
        for each in self.scores:
            for start in range(0, each.count, _PIECE // 16):
                yield from each.rows(start, start + _PIECE // 16)


def stands_for(run: int) -> list[Any]:
    """Return a placeholder for a run in a list."""
    return [Raw(b"%b%d%b" % (MARK, run, MARK))]


def in_pieces(entries: Iterator[object], size: int) -> Iterator[bytes]:
    """Encode `entries` as JSON list items, `size` at a time."""
    before = b""
    while part := list(islice(entries, size)):
        yield before + msgspec.json.encode(part)[1:-1]
        before = b","


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
