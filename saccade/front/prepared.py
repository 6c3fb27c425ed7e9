"""A request while it is being prepared, and the result.

Prompt            tokens, spans and images, as the engine needs them
Preparation       the request, and what the steps (`front/steps/`) have computed so far
PreparedRequest   a request that is ready for the engine
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
    """A prompt as the engine needs it. Each image placeholder is expanded to as many tokens as the
    image has.
    """

    tokens: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    opened: tuple[OpenedImage, ...] = ()  # the images, in order
    places: tuple[str, ...] = ()  # for each image, its path in the client's request
    # state after the prompt, as in `reasoning_at`; None if the model does not reason
    reasoning: Where | None = None
    breakpoints: tuple[tuple[int, int], ...] = ()  # as in `Caching`
    # (offset in tokens, path in the client's request) for the end of each chat part, in order;
    # empty unless the request asks for cache diagnostics
    message_offsets: tuple[tuple[int, str], ...] = ()
    extras: Extras = ()  # results of plugins' steps


def count_tokens(encoded: EncodedPrompt, opened: Sequence[Opened]) -> int:
    """Return the number of tokens of a prompt and of its images, without the tokens around
    images.
    """
    images = [image for each in opened for image in each.images]
    return len(encoded.tokens) + sum(each.image.num_tokens - 1 for each in images)


class Answers(Protocol):
    """The methods of `RequestManager` that an `AnswerFollower` may use."""

    @property
    def metrics(self) -> Metrics: ...

    def generate(self, *prepared: PreparedRequest) -> AsyncGenerator[AnswerUpdate, None]:
        """Submit the requests, and yield updates of their answers as they arrive."""
        ...

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` as a background task, which is cancelled when the server stops."""
        ...


class AnswerFollower(Protocol):
    """Observes the answers to one request on behalf of a plugin."""

    def take_update(self, update: AnswerUpdate) -> AnswerUpdate:
        """Return the update to send to the client, which is `update` or a modified copy."""
        ...

    def end(self, prepared: PreparedRequest, ready: Ready) -> None:
        """Called when all answers have finished without an error."""
        ...


FollowAnswers = Callable[[Answers], AnswerFollower]
"""Creates the `AnswerFollower` of a request, when the request is submitted to the engine."""


@dataclass(slots=True)
class Preparation:
    """A request, and the results of the steps that have prepared it so far.

    For a plain text prompt, most fields keep their defaults.
    """

    asked: GenerationRequest  # as received
    context_length: int
    client: Client
    budget: MemoryBudget
    arrival: float
    request: GenerationRequest = field(init=False)  # as modified by the steps
    # the prompt
    readable: int = field(init=False)  # maximum prompt tokens to encode
    kept: int | None = None  # maximum prompt tokens to keep, or None for all
    encoded: EncodedPrompt = EncodedPrompt([])  # noqa: RUF009 - frozen
    opened: tuple[Opened, ...] = ()
    prompt: Prompt = Prompt(())
    # the answer
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen
    grammar: str = ""
    rules: TokenRules = NO_RULES
    prediction: tuple[int, ...] = ()
    page_text: tuple[int, ...] = ()  # as in `Caching`
    reading: ReadAs = PLAIN  # how to parse the answer
    ignored: tuple[str, ...] = ()  # fields that this model's chat template does not support
    # results of plugins' steps
    extras: Extras = ()
    follow: tuple[FollowAnswers, ...] = ()
    # the last image of the session's previous request, if known
    shown_before: ImageKey | None = None

    def __post_init__(self) -> None:
        self.request, self.readable = self.asked, self.context_length

    def kept_of(self, tokens: int) -> int:
        """Return how many of `tokens` prompt tokens remain after the requested truncation."""
        return tokens if self.kept is None else min(tokens, self.kept)

    def finish(self) -> PreparedRequest:
        """Return the request for the engine, after all steps have run."""
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
                page_text=self.page_text,
            ),
            prompt_logprobs=request.prompt_logprobs,
            rules=self.rules,
            priority=0 if request.rules is None else request.rules.priority,
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
    """A request that is ready for the engine.

    The engine gets it `n` times, once for each answer, with a different seed each time.
    """

    request: Request
    opened: tuple[OpenedImage, ...] = ()  # in the order of `request.images`
    # the path of each image in the client's request, such as "messages[2].content[0]"
    places: tuple[str, ...] = ()
    n: int = 1  # number of answers
    reading: ReadAs = PLAIN  # how to parse the answers
    message_offsets: tuple[tuple[int, str], ...] = ()  # as in `Prompt`
    silent: bool = False  # as in `GenerationRequest`
    ignored: tuple[str, ...] = ()  # fields that this model's chat template does not support
    extras: Extras = ()
    follow: tuple[FollowAnswers, ...] = ()  # creates observers of the answers
    # the last image of the session's previous request, if known
    shown_before: ImageKey | None = None

    def shown_tokens(self, video: bool) -> int:
        """Return the number of prompt tokens that represent videos, or still images if `video` is
        False.
        """
        return sum(
            span.length for span in self.request.spans if self.opened[span.image].of_video == video
        )
