"""The step that converts cache breakpoints from parts of a chat to token offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from saccade.front.breakpoints import Mark, choose
from saccade.front.prepared import Preparation, Prompt
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest
from saccade.front.step_order import StepContext
from saccade.text.prompt.content_shapes import TOOLS
from saccade.text.prompt.message_offsets import MessageOffset


class KeepPrompt:
    """Prepares requests with cache breakpoints or other cache settings."""

    def __init__(self, context: StepContext) -> None:
        self._spec = context.spec

    async def check(self, preparation: Preparation) -> None:
        """Raise InvalidRequest if the request has too many breakpoints."""
        self.breakpoints_of(preparation.request)

    async def set_breakpoints(self, preparation: Preparation) -> None:
        """Set the breakpoints of the prompt. For cache diagnostics, also set the offsets of its
        parts.
        """
        prompt = preparation.prompt
        preparation.prompt = self.with_breakpoints(preparation.request, preparation.encoded, prompt)

    def with_breakpoints(
        self, request: GenerationRequest, encoded: EncodedPrompt, prompt: Prompt
    ) -> Prompt:
        """Return the prompt with cache breakpoints and, for cache diagnostics, the offsets of its
        parts.
        """
        spans, images = prompt.spans, [each.image for each in prompt.opened]
        ends = encoded.message_offsets
        found = [(self._spec.widened(at, spans, images), mark) for at, mark in ends]
        marks, chat = self.breakpoints_of(request), request.chat
        message_offsets = (
            (at, chat.place_of(mark.message, mark.part))
            for at, mark in found
            if mark.message != TOOLS or (chat.tools and chat.tools.tools)
        )
        return replace(
            prompt,
            breakpoints=_breakpoints(marks, request, found, len(prompt.tokens)),
            message_offsets=tuple(message_offsets) if request.cache.diagnose else (),
        )

    @staticmethod
    def breakpoints_of(request: GenerationRequest) -> Sequence[Mark]:
        """Return the breakpoints of a request that are used. Raises InvalidRequest if there are too
        many.
        """
        return choose(request.chat.marks, request.cache)


def _breakpoints(
    marks: Sequence[Mark],
    request: GenerationRequest,
    found: Sequence[tuple[int, MessageOffset]],
    length: int,
) -> tuple[tuple[int, int], ...]:
    """Return the breakpoints as (token offset, seconds), sorted by offset.

    If several have the same offset, the longest lifetime is used.
    """
    ends = {(each.message, each.part): at for at, each in found}
    points: dict[int, int] = {}
    for mark in marks:
        message = TOOLS if mark.message is None else mark.message
        if mark.place == request.cache.place:
            at = length
        elif mark.part is not None or mark.message is None:
            at = ends.get((message, mark.part), 0)
        else:  # after the last part of the message that the template shows
            at = max((at for at, each in found if each.message <= message), default=0)
        if at:
            points[at] = max(points.get(at, 0), mark.seconds or request.cache.default)
    return tuple(sorted(points.items()))
