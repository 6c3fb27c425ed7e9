"""From what a client asks to what the engine runs: `Intake.prepare`.

Owns the order of the steps: pictures named (not decoded), template, tokens, placeholders widened to
spans, limits, sampling with every default filled in. Knows nothing of HTTP and nothing of the
engine but its context length.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from saccade.core.errors import CheckpointError, InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.types import Request, SamplingParams, Span
from saccade.front.client import ANYBODY, Client
from saccade.media.media import ImageSource, Media, Picture
from saccade.media.turns import BOUNDLESS, Asker, Room
from saccade.text.prompt import ChatTemplate, TemplateMessage, Tokenizer

Part = str | ImageSource
"""A piece of a message: text, or a picture."""

_LONG_TEXT = 20_000
"""Characters beyond which tokenising would hold up the event loop (about 5 ms) and goes to a
thread.
"""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `fields` are passed to the template as they are: tool_calls, tool_call_id, name,
    reasoning_content.
    """

    role: str
    content: str | tuple[Part, ...] | None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pictures(self) -> tuple[ImageSource, ...]:
        parts = self.content if isinstance(self.content, tuple) else ()
        return tuple(part for part in parts if isinstance(part, ImageSource))

    def for_template(self) -> TemplateMessage:
        """As chat templates read it; what is None is left out, as they expect."""
        message: TemplateMessage = {"role": self.role, **self.fields}
        if isinstance(self.content, tuple):
            message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in self.content
            ]
        elif self.content is not None:
            message["content"] = self.content
        return message


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered by the chat template.

    `variables` are the client's own for the template.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pictures(self) -> tuple[ImageSource, ...]:
        """In the order in which the template mentions them."""
        return tuple(picture for message in self.messages for picture in message.pictures)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants: `n` answers to one prompt (a chat, a text, or token ids).

    `sampling` holds the fields of `SamplingParams` that the client set; the rest get their defaults
    in `prepare`. Raises as that does: a field out of bounds is refused before a picture is fetched.
    """

    prompt: Chat | str | tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    cache_salt: str = ""

    def __post_init__(self) -> None:
        SamplingParams(**self.sampling)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the engine's terms: tokens with every placeholder widened, spans over them, and
    the pictures by their places.
    """

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    pictures: tuple[Picture, ...]
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can go to the engine, and how many answers are wanted (their seeds count up
    from the first).

    `pictures[i]` is `request.images[i]`, and `places[i]` is what the client calls it, e.g.
    "messages[2].content[0]".
    """

    request: Request
    pictures: tuple[Picture, ...] = ()
    places: tuple[str, ...] = ()
    n: int = 1


def load_sampling_defaults(directory: Path) -> SamplingParams:
    """What `generation_config.json` says of sampling, over OpenAI's defaults (temperature 1)."""
    path = directory / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return replace(SamplingParams(temperature=1.0), **given)
    except InvalidRequest as error:
        raise CheckpointError(f"{path}: {error}") from None


class Intake:
    """The front's way in for one model."""

    def __init__(
        self,
        spec: FamilySpec,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        media: Media,
        defaults: SamplingParams,
    ) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.template = template
        self.media = media
        self.defaults = defaults

    async def prepare(
        self, ask: Ask, context_length: int, client: Client = ANYBODY, room: Room = BOUNDLESS
    ) -> Prepared:
        """Everything about `ask` that can be decided without decoding a picture.

        `room`: where bytes that were not sent with it are counted. Raises a RequestError that
        names the field.
        """
        arrival = time.monotonic()
        prompt = await self.read(ask, context_length, client, room)
        sampling = self._sampling(ask, len(prompt.tokens), context_length)
        images = tuple(picture.image for picture in prompt.pictures)
        request = Request(
            secrets.token_hex(12),
            prompt.tokens,
            prompt.spans,
            images,
            sampling,
            client.salt(ask.cache_salt),
            arrival,
            client.share(ask.cache_salt),
        )
        return Prepared(request, prompt.pictures, prompt.places, ask.n)

    async def read(
        self, ask: Ask, context_length: int, client: Client = ANYBODY, room: Room = BOUNDLESS
    ) -> Prompt:
        """The prompt of `ask`, which may be too long for the context, unless that shows before it
        is tokenised.
        """
        sources = ask.prompt.pictures if isinstance(ask.prompt, Chat) else ()
        asker = Asker(client.share(ask.cache_salt), client.name, room)
        pictures = await self.media.open_all(sources, client.salt(ask.cache_salt), asker)
        tokens = await self._tokens(ask.prompt, context_length)
        expanded, spans = self.spec.expand_prompt(tokens, [picture.image for picture in pictures])
        return Prompt(expanded, spans, pictures, tuple(source.param for source in sources))

    async def _tokens(self, prompt: Chat | str | tuple[int, ...], context_length: int) -> list[int]:
        if isinstance(prompt, tuple):
            if outside := [token for token in prompt if token >= self.spec.vocab_size]:
                raise InvalidRequest(
                    f"prompt: token {outside[0]} is not below the vocabulary size, "
                    f"{self.spec.vocab_size}",
                    "prompt",
                )
            return list(prompt)
        if isinstance(prompt, str):
            text, special = prompt, True
        else:
            text, special = self._render(prompt), False
        if len(text) < _LONG_TEXT:
            return self.tokenizer.encode(text, special)

        def encode() -> list[int]:
            least = -(-len(text) // self.tokenizer.longest_token)
            if least > context_length:
                raise _too_long(
                    prompt, f"{len(text)} characters, so at least {least} tokens", context_length
                )
            return self.tokenizer.encode(text, special)

        return await asyncio.to_thread(encode)

    def _render(self, chat: Chat) -> str:
        return self.template.render(
            [message.for_template() for message in chat.messages],
            None if chat.tools is None else list(chat.tools),
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=chat.variables,
        )

    def _sampling(self, ask: Ask, prompt_tokens: int, context_length: int) -> SamplingParams:
        """The request's sampling with nothing left open, and the answer bounded by what the context
        has left.
        """
        if not prompt_tokens:
            raise InvalidRequest("the prompt is empty", "prompt")
        room = context_length - prompt_tokens
        if room < 1:
            raise _too_long(ask.prompt, f"{prompt_tokens} tokens", context_length)
        given = {"max_tokens": room, "seed": secrets.randbits(63), **ask.sampling}
        sampling = replace(self.defaults, **given)
        sampling = replace(
            sampling,
            max_tokens=min(sampling.max_tokens, room),
            seed=sampling.seed % 2**63,
            top_k=max(0, sampling.top_k),
        )
        if (
            sampling.top_p == 0.0
        ):  # the smallest set that holds nothing at all still holds the likeliest token
            sampling = replace(sampling, top_p=1.0, top_k=1)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens={sampling.min_tokens} is more than the answer may have: "
                f"{sampling.max_tokens}",
                "min_tokens",
            )
        for name, ids in (
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if outside := [token for token in ids if not 0 <= token < self.spec.vocab_size]:
                raise InvalidRequest(
                    f"{name}: token {outside[0]} is not within the vocabulary of "
                    f"{self.spec.vocab_size}",
                    name,
                )
        return sampling


def _too_long(
    prompt: Chat | str | tuple[int, ...], has: str, context_length: int
) -> InvalidRequest:
    chat = isinstance(prompt, Chat)
    advice = (
        'shorten it, send fewer pictures, or smaller ones (detail "low", or max_pixels)'
        if chat
        else "shorten it"
    )
    allowed = f"the context length of {context_length} allows {context_length - 1} and an answer"
    return InvalidRequest(
        f"the prompt has {has}; {allowed}: {advice}",
        "messages" if chat else "prompt",
        "context_length_exceeded",
    )
