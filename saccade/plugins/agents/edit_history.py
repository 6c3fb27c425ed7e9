"""Shortens a conversation as its request specifies (`plugins/agents/history_edits.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, islice, pairwise

from saccade.front.conversation import Chat
from saccade.front.extras import find_extra, with_extra
from saccade.front.prepared import Preparation, count_tokens
from saccade.front.step_order import READABLE, StepContext
from saccade.front.steps.open_sources import OpenSources
from saccade.media.opened import Opened
from saccade.plugins.agents.history_edits import AppliedEdit, AskedEdit

MAX_FORMS = 16
"""Maximum number of shorter versions of a conversation to try."""


class EditHistory:
    """Shortens the conversations of chats that request it."""

    def __init__(self, context: StepContext) -> None:
        self._prompts = context.prompts
        self._sources = context.step(OpenSources)

    async def set_readable(self, preparation: Preparation) -> None:
        """Allow a prompt that exceeds the context length, because `apply` may shorten it."""
        preparation.readable = READABLE * preparation.context_length
        preparation.kept = 1

    async def apply(self, preparation: Preparation) -> None:
        """Shorten the conversation. This needs the token counts of its images, so it runs after
        they are opened.
        """
        request, opened = preparation.request, preparation.opened
        asked, before = (
            find_extra(request.extras, AskedEdit),
            count_tokens(preparation.encoded, opened),
        )
        assert asked is not None
        edit, applied = asked.edit.naming(_names(preparation.asked.chat)), AppliedEdit(before)
        request = replace(request, extras=with_extra(request.extras, AskedEdit(edit)))
        preparation.request = request
        context = preparation.context_length
        most = context - min(request.sampling.get("max_tokens", 1), context // 2)
        preparation.kept = None
        images = {id(source): each for source, each in zip(request.chat.sources, opened)}
        sizes = _sizes(request.chat, images, before)
        forms = edit.shorter(request.chat, sizes, most)
        for chat, uses in islice(forms, MAX_FORMS):
            shorter = replace(request, prompt=chat)
            left = tuple(images[id(source)] for source in chat.sources)
            text = await self._prompts.encode(shorter, READABLE * context)
            text = await self._sources.with_placeholders(shorter, text, left, READABLE * context)
            tokens = count_tokens(text, left)
            cleared = max(0, before - tokens)
            if cleared >= edit.least:
                preparation.request, preparation.encoded, preparation.opened = shorter, text, left
                applied = AppliedEdit(before, cleared, uses)
            if tokens <= most:
                break
        preparation.extras = with_extra(preparation.extras, applied)


def _names(chat: Chat) -> dict[str, str]:
    """Return the client's function names by call ID. The chat may already have the model's names
    instead.
    """
    return {
        call.get("id", ""): call["function"]["name"]
        for message in chat.messages
        for call in message.fields.get("tool_calls", ())
    }


def _sizes(chat: Chat, images: Mapping[int, Opened], tokens: int) -> list[int]:
    """Estimate the number of tokens of each message. Image tokens are counted exactly. The other
    tokens are divided among the messages in proportion to their text length.
    """
    shown = [
        sum(_shown(images[id(source)]) for source in message.media) for message in chat.messages
    ]
    characters = [message.num_characters + 1 for message in chat.messages]
    share = (tokens - sum(shown)) / sum(characters)
    ends = [0, *(round(share * end) for end in accumulate(characters))]
    texts = [end - begin for begin, end in pairwise(ends)]
    return [image + text for image, text in zip(shown, texts, strict=True)]


def _shown(opened: Opened) -> int:
    return sum(each.image.num_tokens for each in opened.images)
