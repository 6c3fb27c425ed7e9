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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from saccade.core.errors import CheckpointError, InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.types import Request, SamplingParams, Span
from saccade.front.client import ANYBODY, Client
from saccade.front.compiler import Compiler, MakeWish
from saccade.front.content import Chat
from saccade.media.media import Media, Picture
from saccade.media.turns import BOUNDLESS, Asker, Room
from saccade.text.answer import PLAIN, Reading
from saccade.text.grammar import Wish
from saccade.text.literal import Literals
from saccade.text.prompt import ChatTemplate, Tokenizer

T = TypeVar("T")

_LONG_TEXT = 8_000
"""Characters beyond which a prompt is rendered and tokenised in a thread (about 5 ms)."""

_MANY_MESSAGES = 100

_SLACK = 16
"""A template may leave out most of what a chat holds. Text of so many times what the context can
hold is refused all the same.
"""

_READERS = 2
"""Threads that read large bodies and long prompts. More would take more turns from the event loop,
which waits for each of them to let go of the interpreter.
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants: `n` answers to one prompt (a chat, a text, or token ids).

    `add_special_tokens`: what the tokenizer puts around a bare text is added; None: to texts, not
    to chats. `silent`: of the answers only their ends are told. `sampling` holds the fields of
    `SamplingParams` that the client set; the rest get their defaults in `prepare`. Raises as that
    does: a field out of bounds is refused before an image is fetched. `wish`: what the answers must
    look like; None: any text.
    """

    prompt: Chat | str | tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    cache_salt: str = ""
    add_special_tokens: bool | None = None
    silent: bool = False
    wish: Wish | MakeWish | None = None

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
    "messages[2].content[0]". `reading`: how the answers are to be read. `silent`: as in `Ask`.
    """

    request: Request
    pictures: tuple[Picture, ...] = ()
    places: tuple[str, ...] = ()
    n: int = 1
    reading: Reading = PLAIN
    silent: bool = False


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
        special_tokens_in_content: bool = False,
        compiler: Compiler | None = None,
    ) -> None:
        """`special_tokens_in_content`: special tokens that clients write in messages are such.
        `compiler`: None: one of the tokenizer's own vocabulary.
        """
        self.spec = spec
        self.tokenizer = tokenizer
        self.template = template
        self.media = media
        self.defaults = defaults
        self._compiler = compiler or Compiler(
            tokenizer.backend.to_str(), spec.vocab_size, spec.eos_token_ids
        )
        self._literals = None if special_tokens_in_content else Literals(tokenizer)
        self._readers = ThreadPoolExecutor(_READERS, "saccade-reader")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of long work, which other requests need not wait for."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def prepare(
        self, ask: Ask, context_length: int, client: Client = ANYBODY, room: Room = BOUNDLESS
    ) -> Prepared:
        """Everything about `ask` that can be decided without decoding a picture.

        `room`: where bytes that were not sent with it are counted. Raises a RequestError that
        names the field.
        """
        arrival = time.monotonic()
        # Before anything is fetched: a schema that will not do is refused for less.
        grammar = await self._compiler.compile(ask.wish) if ask.wish is not None else None
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
            grammar="" if grammar is None else grammar.text,
        )
        return Prepared(request, prompt.pictures, prompt.places, ask.n, silent=ask.silent)

    async def read(
        self, ask: Ask, context_length: int, client: Client = ANYBODY, room: Room = BOUNDLESS
    ) -> Prompt:
        """The prompt of `ask`, which may be too long for the context, unless that shows before it
        is tokenised.
        """
        sources = ask.prompt.pictures if isinstance(ask.prompt, Chat) else ()
        asker = Asker(client.share(ask.cache_salt), client.name, room)
        pictures = await self.media.open_all(sources, client.salt(ask.cache_salt), asker)
        if isinstance(prompt := ask.prompt, tuple):
            tokens = self._check_tokens(prompt)
        elif isinstance(prompt, Chat):
            render = partial(self._encode_chat, prompt, context_length, ask.add_special_tokens)
            many = len(prompt.messages) > _MANY_MESSAGES or prompt.num_characters > _LONG_TEXT
            tokens = await self.in_thread(render) if many else render()
        else:
            special = ask.add_special_tokens is not False
            encode = partial(self._encode, prompt, "prompt", context_length, special)
            tokens = await self.in_thread(encode) if len(prompt) > _LONG_TEXT else encode()
        expanded, spans = self.spec.expand_prompt(tokens, [picture.image for picture in pictures])
        return Prompt(expanded, spans, pictures, tuple(source.param for source in sources))

    def _check_tokens(self, tokens: tuple[int, ...]) -> list[int]:
        if outside := [token for token in tokens if token >= self.spec.vocab_size]:
            raise InvalidRequest(
                f"prompt: token {outside[0]} is not below the vocabulary size, "
                f"{self.spec.vocab_size}",
                "prompt",
            )
        return list(tokens)

    def _encode(self, text: str, param: str, context_length: int, special: bool) -> list[int]:
        self._check_length(text, param, context_length)
        return self.tokenizer.encode(text, special)

    def _encode_chat(self, chat: Chat, context_length: int, special: bool | None) -> list[int]:
        if chat.num_characters > _SLACK * context_length * self.tokenizer.longest_token:
            raise too_long("messages", f"{chat.num_characters} characters", context_length)
        given: Any = {
            "messages": [message.for_template() for message in chat.messages],
            "tools": None if chat.tools is None else list(chat.tools),
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "variables": chat.variables,
        }
        if self._literals is None:
            text = self.template.render(**given)
            return self._encode(text, "messages", context_length, bool(special))
        rendered = self._literals.render(self.template, **given)
        self._check_length(rendered.text, "messages", context_length)
        return self._literals.encode(rendered, bool(special))

    def _check_length(self, text: str, param: str, context_length: int) -> None:
        """Raises InvalidRequest for what cannot fit, whatever its tokens are."""
        least = -(-len(text) // self.tokenizer.longest_token)
        if least > context_length:
            raise too_long(
                param, f"{len(text)} characters, so at least {least} tokens", context_length
            )

    def _sampling(self, ask: Ask, prompt_tokens: int, context_length: int) -> SamplingParams:
        """The request's sampling with nothing left open, and the answer bounded by what the context
        has left.
        """
        if not prompt_tokens:
            raise InvalidRequest("the prompt is empty", "prompt")
        room = context_length - prompt_tokens
        if room < 1:
            param = "messages" if isinstance(ask.prompt, Chat) else "prompt"
            raise too_long(param, f"{prompt_tokens} tokens", context_length)
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


def too_long(param: str, has: str, context_length: int) -> InvalidRequest:
    """For a prompt that leaves no room for an answer.

    Clients know the error by its first words. They look for them in Python's `repr` of the whole
    error, where a double quote anywhere in the message would put a backslash before the apostrophe.
    """
    advice = (
        "shorten it, send fewer pictures, or smaller ones (detail: low, or max_pixels)"
        if param == "messages"
        else "shorten it"
    )
    return InvalidRequest(
        f"This model's maximum context length is {context_length} tokens. The prompt has {has}; "
        f"the context length of {context_length} allows {context_length - 1} and an answer: "
        f"{advice}",
        param,
        "context_length_exceeded",
    )
