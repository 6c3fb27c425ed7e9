"""The step that checks and opens the images and videos of a request.

Opening a video yields the text around its frames, which is added to the prompt. Images are decoded
later.
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade.core.client import Client
from saccade.front.prepared import Preparation
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest
from saccade.front.step_order import StepContext
from saccade.media.opened import Opened, OpenedVideo
from saccade.media.sources.fairness import MemoryBudget, Requester
from saccade.media.sources.source import Source


class OpenSources:
    """Prepares requests with images or videos."""

    def __init__(self, context: StepContext) -> None:
        self._media = context.media
        self._prompts = context.prompts

    async def check(self, preparation: Preparation) -> None:
        """Raise InvalidRequest for media that this model cannot read, before any is fetched."""
        self._media.check_sources(preparation.request.chat.sources)

    async def open(self, preparation: Preparation) -> None:
        """Open all images and videos. Add the text around the frames of videos to the prompt."""
        request, client, budget = preparation.request, preparation.client, preparation.budget
        opened = await self.opened(request, request.chat.sources, client, budget)
        preparation.encoded = await self.with_placeholders(
            request, preparation.encoded, opened, preparation.readable
        )
        preparation.opened = opened

    async def opened(
        self,
        request: GenerationRequest,
        sources: Sequence[Source],
        client: Client,
        budget: MemoryBudget,
    ) -> tuple[Opened, ...]:
        """Open `sources`, and count their bytes in `budget`. Raises a RequestError."""
        salt = request.adapter.salted(client.salt(request.cache_salt))
        requester = Requester.of(client, request.cache_salt, budget)
        return await self._media.open_all(sources, salt, requester)

    async def with_placeholders(
        self,
        request: GenerationRequest,
        encoded: EncodedPrompt,
        opened: Sequence[Opened],
        readable: int,
    ) -> EncodedPrompt:
        """Return the prompt with a placeholder for each group of frames of a video, and the text
        around them.
        """
        texts = [each.text for each in opened if isinstance(each, OpenedVideo)]
        return await self._prompts.encode(request, readable, texts) if texts else encoded
