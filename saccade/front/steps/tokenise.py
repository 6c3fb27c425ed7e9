"""The steps of every request: its text as tokens, and its placeholders as spans.

Knows nothing of fetching images, or of any feature that a request may name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from saccade.core.errors import InvalidRequest
from saccade.core.family import FamilySpec
from saccade.front.fields import too_long
from saccade.front.prepared import Preparation, Prompt
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest, PromptEncoder
from saccade.front.steps.limit_answer import LimitAnswer
from saccade.media.opened import Opened
from saccade.text.answer.reasoning import Tags


class Tokenise:
    """Turns prompts into tokens for one model. tags: reasoning's, in answers."""

    def __init__(
        self, spec: FamilySpec, prompts: PromptEncoder, limits: LimitAnswer, tags: Tags
    ) -> None:
        self._spec = spec
        self._prompts = prompts
        self._limits = limits
        self._tags = tags

    async def encode(self, preparation: Preparation) -> None:
        """Tokenise the text, with one token per image. The tokens leave a budget for an answer."""
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
        """Tokenise the text, whether it leaves room for an answer or not."""
        request = preparation.request
        preparation.encoded = await self._prompts.encode(request, preparation.readable)

    async def widen(self, preparation: Preparation) -> None:
        """Widen every placeholder to its image's length."""
        request, encoded = preparation.request, preparation.encoded
        preparation.prompt = self.widened(request, encoded, preparation.opened)

    def widened(
        self, request: GenerationRequest, encoded: EncodedPrompt, opened: Sequence[Opened]
    ) -> Prompt:
        """Return the prompt with these images and videos in the places of its sources."""
        shown = [image for each in opened for image in each.images]
        steps = [step for each in opened for step in each.steps]
        images = [each.image for each in shown]
        try:
            tokens, spans = self._spec.expand_prompt(encoded.tokens, images, steps)
        except InvalidRequest as fault:  # the family knows no client's names
            raise InvalidRequest(fault.message, request.field) from None
        if not opened:
            return Prompt(tokens, spans, reasoning=encoded.reasoning)
        sources = zip(request.chat.sources, opened, strict=True)
        places = tuple(source.param for source, each in sources for _ in each.images)
        return Prompt(tokens, spans, tuple(shown), places, encoded.reasoning)

    async def predict(self, preparation: Preparation) -> None:
        """Tokenise the answer that the client expects, as a source of draft tokens."""
        preparation.prediction = await self._prompts.predicted(preparation.request.prediction)

    async def note_ignored(self, preparation: Preparation) -> None:
        """Name the fields that this model's template lacks a word for."""
        request = preparation.request
        names = self._prompts.ignored(request.chat)
        preparation.ignored += tuple(request.names[name] for name in names)
