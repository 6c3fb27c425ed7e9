"""The steps that apply to every request: tokenize its text, expand its placeholders, and limit its
answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from saccade.core.errors import InvalidRequest
from saccade.core.types import LARGEST, SamplingParams, fill_sampling
from saccade.front.conversation import Chat
from saccade.front.fields import too_long
from saccade.front.prepared import Preparation, Prompt
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest
from saccade.front.step_order import StepContext
from saccade.media.opened import Opened


class Tokenise:
    """Converts prompts to tokens for one model."""

    def __init__(self, context: StepContext) -> None:
        self._spec = context.spec
        self._prompts = context.prompts
        self._limits = context.step(LimitAnswer)
        self._tags = context.tags

    async def encode(self, preparation: Preparation) -> None:
        """Tokenize the text, with a single token for each image, and compute the sampling
        parameters.

        Raises InvalidRequest if the tokens leave no space for an answer.
        """
        request, most = preparation.request, preparation.context_length
        encoded = await self._prompts.encode(request, preparation.readable)
        least = preparation.kept_of(len(encoded.tokens))
        if least >= most and request.chat.sources:
            raise too_long(request.names["messages"], f"at least {least} tokens", most, True)
        preparation.sampling = self._limits.sampling(request, least, most)
        preparation.encoded = encoded
        where = encoded.reasoning if request.separate_reasoning else None
        preparation.reading = replace(preparation.reading, where=where, tags=self._tags)

    async def read(self, preparation: Preparation) -> None:
        """Tokenize the text. It need not leave space for an answer."""
        request = preparation.request
        preparation.encoded = await self._prompts.encode(request, preparation.readable)

    async def widen(self, preparation: Preparation) -> None:
        """Expand each placeholder to as many tokens as its image has."""
        request, encoded = preparation.request, preparation.encoded
        preparation.prompt = self.widened(request, encoded, preparation.opened)

    def widened(
        self, request: GenerationRequest, encoded: EncodedPrompt, opened: Sequence[Opened]
    ) -> Prompt:
        """Return the engine's prompt for encoded text and opened images and videos."""
        shown = [image for each in opened for image in each.images]
        steps = [step for each in opened for step in each.steps]
        images = [each.image for each in shown]
        try:
            tokens, spans = self._spec.expand_prompt(encoded.tokens, images, steps)
        except InvalidRequest as fault:  # the family does not have the client's name of the field
            raise InvalidRequest(fault.message, request.field) from None
        if not opened:
            return Prompt(tokens, spans, reasoning=encoded.reasoning)
        sources = zip(request.chat.sources, opened, strict=True)
        places = tuple(source.param for source, each in sources for _ in each.images)
        return Prompt(tokens, spans, tuple(shown), places, encoded.reasoning)

    async def predict(self, preparation: Preparation) -> None:
        """Tokenize texts that the answer may repeat, for draft tokens."""
        request = preparation.request
        preparation.prediction = await self._prompts.predicted(request.prediction)
        preparation.page_text = await self._prompts.predicted(request.page_text)

    async def note_ignored(self, preparation: Preparation) -> None:
        """Record which fields of the request the model's template does not support."""
        request = preparation.request
        names = self._prompts.ignored(request.chat)
        preparation.ignored += tuple(request.names[name] for name in names)


class LimitAnswer:
    """Limits the length of answers, and adds defaults of sampling fields that a request
    leaves out.
    """

    def __init__(self, context: StepContext) -> None:
        self._defaults = context.defaults.sampling
        self._vocab_size = context.spec.vocab_size

    @property
    def usual_length(self) -> str:
        """A description of the default maximum length of answers."""
        most = self._defaults.max_tokens
        return "as long as the context allows" if most == LARGEST else f"{most} tokens at most"

    async def limit(self, preparation: Preparation) -> None:
        """Compute the sampling parameters again, now that the length of the prompt is final."""
        length = len(preparation.prompt.tokens)
        preparation.sampling = self.sampling(
            preparation.request, length, preparation.context_length
        )

    def sampling(
        self, request: GenerationRequest, prompt_tokens: int, context_length: int
    ) -> SamplingParams:
        """Return the request's sampling parameters with defaults. The answer is limited to the rest
        of the context.

        Raises InvalidRequest if the prompt is empty or leaves no space for an answer.
        """
        if not prompt_tokens:
            raise InvalidRequest(
                "the prompt has no tokens: send a text or an image", request.names["prompt"]
            )
        left = context_length - prompt_tokens
        if left < 1:
            chat = isinstance(request.prompt, Chat)
            raise too_long(request.field, f"{prompt_tokens} tokens", context_length, chat)
        sampling = fill_sampling(request.sampling, self._defaults, left, secrets.randbits(63))
        for name, tokens in sampling.listed_tokens.items():
            self.check_tokens(name, tokens)
        return sampling

    def check_tokens(self, name: str, ids: Sequence[int]) -> None:
        """Raise InvalidRequest that names the field `name` if one of `ids` is not in the
        vocabulary.
        """
        size = self._vocab_size
        if outside := [token for token in ids if not 0 <= token < size]:
            raise InvalidRequest(
                f"{name}: token {outside[0]} is not within the vocabulary of {size}", name
            )
