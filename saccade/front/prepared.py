"""A request while it is prepared, and what comes of it.

Prompt            tokens, spans and images, in the engine's terms
Preparation       what the steps (`front/steps/`) have found so far
PreparedRequest   what can go to the engine
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from saccade.core.client import Client
from saccade.core.metrics import Metrics
from saccade.core.token_rules import NO_RULES, TokenRules
from saccade.core.types import Caching, ImageKey, Request, SamplingParams, Span
from saccade.front.answer_update import AnswerUpdate
from saccade.front.extras import Extras
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest
from saccade.ipc.messages import Ready
from saccade.media.opened import Opened, OpenedImage
from saccade.media.sources.fairness import MemoryBudget
from saccade.text.answer.reader import PLAIN, ReadAs
from saccade.text.answer.reasoning import Where


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the engine's terms: tokens with every placeholder widened, spans over them, and
    the images by their places. `reasoning`: the state in which the prompt leaves a reasoning model.
    """

    tokens: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    opened: tuple[OpenedImage, ...] = ()
    places: tuple[str, ...] = ()
    reasoning: Where | None = None
    breakpoints: tuple[tuple[int, int], ...] = ()  # as in `Caching`
    # (tokens, place) for the end of each chat part, in order; only for requests that ask why the
    # cache missed
    message_offsets: tuple[tuple[int, str], ...] = ()
    extras: Extras = ()  # what features' steps found


def count_tokens(encoded: EncodedPrompt, opened: Sequence[Opened]) -> int:
    """Count a text's tokens with those of its images, but for what stands around these."""
    images = [image for each in opened for image in each.images]
    return len(encoded.tokens) + sum(each.image.num_tokens - 1 for each in images)


class Answers(Protocol):
    """What a follower of answers may use (`RequestManager`)."""

    @property
    def metrics(self) -> Metrics: ...

    def generate(self, *prepared: PreparedRequest) -> AsyncGenerator[AnswerUpdate, None]:
        """Yield the events of the answers to requests, as they arrive."""
        ...

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run work until it ends, or the server stops."""
        ...


class AnswerFollower(Protocol):
    """Hears of a request's answers, for a feature."""

    def take_update(self, update: AnswerUpdate) -> AnswerUpdate:
        """Return news of an answer as the client gets them."""
        ...

    def end(self, prepared: PreparedRequest, ready: Ready) -> None:
        """Hear that all answers have ended well."""
        ...


FollowAnswers = Callable[[Answers], AnswerFollower]
"""Called when the request goes to the engine."""


@dataclass(slots=True)
class Preparation:
    """A request with what its steps have found. A plain text leaves most fields at their defaults.

    `asked` is the request as it came, `request` as the steps have left it.
    Prompt: `readable` is the most tokens that are read, `kept` the most that stay (by default all).
    Answer: `reading` says how answers are read, `ignored` names fields that the model lacks a
    switch for.
    """

    asked: GenerationRequest
    context_length: int
    client: Client
    budget: MemoryBudget
    arrival: float
    request: GenerationRequest = field(init=False)
    # the prompt
    readable: int = field(init=False)
    kept: int | None = None
    encoded: EncodedPrompt = EncodedPrompt([])  # noqa: RUF009 - frozen
    opened: tuple[Opened, ...] = ()
    prompt: Prompt = Prompt(())
    # the answer
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen
    grammar: str = ""
    rules: TokenRules = NO_RULES
    prediction: tuple[int, ...] = ()
    reading: ReadAs = PLAIN
    ignored: tuple[str, ...] = ()
    # what features' steps have found
    extras: Extras = ()
    follow: tuple[FollowAnswers, ...] = ()
    shown_before: ImageKey | None = None

    def __post_init__(self) -> None:
        self.request, self.readable = self.asked, self.context_length

    def kept_of(self, tokens: int) -> int:
        """Return how many out of `tokens` tokens stay."""
        return tokens if self.kept is None else min(tokens, self.kept)

    def finish(self) -> PreparedRequest:
        """Make the request that can go to the engine."""
        request, prompt, cache = self.request, self.prompt, self.request.cache
        made = Request(
            secrets.token_hex(12),
            prompt.tokens,
            prompt.spans,
            tuple([each.image for each in prompt.opened]),
            self.sampling,
            self.client.salt(request.cache_salt),
            self.arrival,
            self.client.share(request.cache_salt),
            grammar=self.grammar,
            caching=Caching(
                prompt.breakpoints,
                cache.diagnose,
                cache.family,
                request.adapter,
                prediction=self.prediction,
            ),
            prompt_logprobs=request.prompt_logprobs,
            rules=self.rules,
            priority=request.rules.priority,
        )
        return PreparedRequest(
            made,
            prompt.opened,
            prompt.places,
            request.n,
            self.reading,
            prompt.message_offsets,
            request.silent,
            self.ignored,
            self.extras,
            self.follow,
            self.shown_before,
        )


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can go to the engine, and the number of wanted answers (seeds count up from
    the first).

    `opened[i]` is `request.images[i]`, and `places[i]` is its name for the client, e.g.
    "messages[2].content[0]". `reading`: how the answers are read. `message_offsets`: as in
    `Prompt`. `silent`: as in `GenerationRequest`. `ignored`: fields that the model lacks a switch
    for. `extras`: of features. `follow`: whom to tell of the answers. `shown_before`: the last
    image of the request before this one, if that is known.
    """

    request: Request
    opened: tuple[OpenedImage, ...] = ()
    places: tuple[str, ...] = ()
    n: int = 1
    reading: ReadAs = PLAIN
    message_offsets: tuple[tuple[int, str], ...] = ()
    silent: bool = False
    ignored: tuple[str, ...] = ()
    extras: Extras = ()
    follow: tuple[FollowAnswers, ...] = ()
    shown_before: ImageKey | None = None

    def shown_tokens(self, video: bool) -> int:
        """Count the prompt tokens that stand for videos, or for still images."""
        return sum(
            span.length for span in self.request.spans if self.opened[span.image].of_video == video
        )
