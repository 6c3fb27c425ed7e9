"""The step that opens the files in a request, and replaces each with parts that the model can read.

A PDF is replaced with the text and the image of each page, in order. An image file is replaced with
the image. A cache breakpoint on a file moves to its last part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from saccade.core.client import Client
from saccade.front.breakpoints import Mark
from saccade.front.conversation import Chat, Message, MessageText, Part
from saccade.front.fields import too_long
from saccade.front.prepared import Preparation
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.step_order import READABLE, StepContext
from saccade.front.steps.tokenise import Tokenise
from saccade.media.sent_files import OpenedPage, SentFiles
from saccade.media.sources.fairness import MemoryBudget, Requester
from saccade.media.sources.source import ImageSource, SentFile


class OpenFiles:
    """Prepares requests with files."""

    def __init__(self, context: StepContext) -> None:
        self._media = context.media
        self._files = SentFiles(context.media)
        self._text = context.step(Tokenise)

    async def open(self, preparation: Preparation) -> None:
        """Replace the files with their pages, and tokenize the result. It must fit in the
        context.
        """
        others = len(preparation.encoded.tokens) + 1
        client, budget = preparation.client, preparation.budget
        (preparation.request,) = await self.opened(
            [preparation.request], client, budget, preparation.context_length, others
        )
        self._media.check_sources(preparation.request.chat.sources)
        await self._text.encode(preparation)

    async def open_within_reason(self, preparation: Preparation) -> None:
        """Replace the files with their pages, and tokenize the result. It must fit in `READABLE`
        times the context.
        """
        client, budget = preparation.client, preparation.budget
        (preparation.request,) = await self.opened(
            [preparation.request], client, budget, preparation.context_length, most=READABLE
        )
        await self._text.read(preparation)

    async def opened(
        self,
        requests: Sequence[GenerationRequest],
        client: Client,
        budget: MemoryBudget,
        context_length: int,
        beside: int = 0,
        most: int = 1,
    ) -> list[GenerationRequest]:
        """Return the requests with each file replaced with its parts.

        A chat is rejected before its pages are read if they and `beside` other tokens exceed `most`
        times the context. Raises a RequestError that names the field.
        """
        files = list({id(file): file for each in requests for file in each.chat.files}.values())
        if not files:
            return [*requests]

        def fits(tokens: Sequence[int]) -> None:
            of_file = {id(file): count for file, count in zip(files, tokens, strict=True)}
            for request in requests:
                shown = request.chat.files
                least = beside + sum(of_file[id(file)] for file in shown)
                if shown and least > most * context_length:
                    param = request.names["messages"]
                    raise too_long(param, f"at least {least} tokens", context_length, True)

        salt = requests[0].cache_salt
        requester = Requester.of(client, salt, budget)
        sources = (source for each in requests for source in each.chat.sources)
        others = sum(isinstance(source, ImageSource) for source in sources)
        opened = await self._files.open(files, client.salt(salt), requester, others, fits)
        parts: dict[int, tuple[Part, ...]] = {}
        texts: dict[int, str] = {}
        for file, found in zip(files, opened, strict=True):
            if isinstance(found, ImageSource):
                parts[id(file)] = (found,)
                continue
            parts[id(file)] = _pages(file, found)
            if not file.view.has_text:
                texts[id(file)] = draft_text("\n".join(page.text for page in found))

        def opened_in(request: GenerationRequest) -> GenerationRequest:
            shown = [texts[id(file)] for file in request.chat.files if id(file) in texts]
            prompt = with_parts(request.chat, parts)
            return replace(request, prompt=prompt, page_text="\n".join(shown))

        return [opened_in(each) if each.chat.files else each for each in requests]


PartsOfFiles = Mapping[int, tuple[Part, ...]]
"""The parts that replace each `SentFile`, by its `id()`."""


def _pages(file: SentFile, pages: Sequence[OpenedPage]) -> tuple[Part, ...]:
    """Return the parts for a document: its heading, then the number, text and image of each page.
    In the bare view, return only images.
    """
    parts: list[Part] = []
    said = file.heading
    for page in pages:
        place = f"{file.param}.pages[{page.number - 1}]"
        if file.view.shown != "bare":
            text = f"{page.text}\n" if page.text and file.view.has_text else ""
            parts.append(MessageText(f"{said}Page {page.number} of {page.of}\n{text}", place))
            said = "\n"
        if page.image is not None:
            parts.append(ImageSource(page.image, place, file.budget))
    return tuple(parts)


def draft_text(lines: str) -> str:
    """Return a text, first in its lines and then in one line, because an answer may keep or join
    the lines.
    """
    return f"{lines}\n{' '.join(lines.split())}" if lines.strip() else ""


def with_parts(chat: Chat, parts: PartsOfFiles) -> Chat:
    """Return the chat with its files replaced. The cache breakpoint of a file moves to its last
    part.
    """
    messages = tuple(
        _with_parts(message, parts) if message.media else message for message in chat.messages
    )
    return replace(chat, messages=messages)


def _with_parts(message: Message, parts: PartsOfFiles) -> Message:
    content: list[Part] = []
    ends = []
    for part in message.parts:
        content += parts[id(part)] if isinstance(part, SentFile) else (part,)
        ends.append(len(content) - 1)
    marks: list[Mark] = [
        mark if mark.part is None else replace(mark, part=ends[mark.part]) for mark in message.marks
    ]
    return replace(message, content=tuple(content), marks=tuple(marks))
