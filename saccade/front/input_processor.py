"""From a client's request to the engine's: `InputProcessor.prepare`.

Owns the order of the steps, cheap refusals first: template, tokens, limits, grammar, images named
(not decoded), placeholders widened to spans, sampling with every default filled in. Knows nothing
of HTTP and nothing of the engine but its context length.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from llguidance import LLTokenizer

from saccade.core.client import ANYBODY, Client
from saccade.core.errors import InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.types import (
    LARGEST,
    MAX_BIAS,
    Caching,
    Request,
    SamplingParams,
    Span,
)
from saccade.front.adapters import salted
from saccade.front.answer_rules import reasoning_tags
from saccade.front.breakpoints import Mark, choose
from saccade.front.compiler import Compiler, MakeWish
from saccade.front.conversation import Chat
from saccade.front.document_parts import files_of, parts_of, with_parts
from saccade.front.fields import too_long
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest, PromptEncoder
from saccade.media.fairness import BOUNDLESS, MemoryBudget, Requester
from saccade.media.media import Media
from saccade.media.opened import Opened, OpenedImage, OpenedVideo
from saccade.media.sources import ImageSource, Source
from saccade.text.answer import tool_calls
from saccade.text.answer.answer_format import SILENT, AnswerFormat
from saccade.text.answer.reader import PLAIN, ReadAs
from saccade.text.answer.reasoning import THINK, Where
from saccade.text.grammar.grammars import OutputConstraint
from saccade.text.grammar.tool_choice import Style, read_tool_choice
from saccade.text.grammar.tools import ToolSet
from saccade.text.prompt.message_offsets import TOOLS, Landmark
from saccade.text.prompt.template import ChatTemplate, Tokenizer

T = TypeVar("T")
Biases = tuple[tuple[int, float], ...]

_COUNTED = 8
"""A prompt is counted, though it will not be answered, up to so many times the context of images.
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the engine's terms: tokens with every placeholder widened, spans over them, and
    the images by their places. `reasoning`: the state in which the prompt leaves a reasoning model.

    breakpoints: as in `Caching`. landmarks: (tokens, place) of the ends of a chat's parts, in
    order; only for requests that ask for reasons of cache misses.
    """

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    opened: tuple[OpenedImage, ...]
    places: tuple[str, ...]
    reasoning: Where | None = None
    breakpoints: tuple[tuple[int, int], ...] = ()
    landmarks: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can go to the engine, and the number of wanted answers (seeds count up from
    the first).

    `opened[i]` is `request.images[i]`, and `places[i]` is its name for the client, e.g.
    "messages[2].content[0]". `reading`: the reading of the answers. `landmarks`: as in `Prompt`.
    `silent`: as in `GenerationRequest`. `ignored`: fields that the model has no switch for.
    """

    request: Request
    opened: tuple[OpenedImage, ...] = ()
    places: tuple[str, ...] = ()
    n: int = 1
    reading: ReadAs = PLAIN
    landmarks: tuple[tuple[int, str], ...] = ()
    silent: bool = False
    ignored: tuple[str, ...] = ()

    def shown_tokens(self, video: bool) -> int:
        """Tokens of the prompt in place of videos, or of still images."""
        return sum(
            span.length for span in self.request.spans if self.opened[span.image].of_video == video
        )


class InputProcessor:
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
        manner: AnswerFormat = SILENT,
    ) -> None:
        """`special_tokens_in_content`: special tokens in clients' messages are special. `compiler`:
        None: one of the tokenizer's own vocabulary. `manner`: the model's way to write calls and
        reasoning.
        """
        self.spec = spec
        self.tokenizer = tokenizer
        self.media = media
        self.defaults = defaults
        self.manner = manner
        self._tags = manner.reasoning or THINK
        self._compiler = compiler or Compiler(
            tokenizer.backend.to_str(), spec.vocab_size, spec.eos_token_ids
        )
        self.prompts = PromptEncoder(spec, tokenizer, template, manner, special_tokens_in_content)

    @property
    def usual_length(self) -> str:
        """The length of an answer whose request names no limit, for people."""
        most = self.defaults.max_tokens
        return "as long as the context allows" if most == LARGEST else f"{most} tokens at most"

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of long work, without holding up other requests."""
        return await self.prompts.in_thread(work)

    async def warm_up(self) -> None:
        """Do what the first chat would wait for: a large vocabulary takes 0.15 s to read."""
        await self.in_thread(lambda: self.tokenizer.longest_token)

    async def prepare(
        self,
        ask: GenerationRequest,
        context_length: int,
        client: Client = ANYBODY,
        room: MemoryBudget = BOUNDLESS,
    ) -> PreparedRequest:
        """Everything about `ask` to be decided without decoding an image.

        `room`: the count of bytes not sent with the request. Raises a RequestError that names the
        field.
        """
        arrival = time.monotonic()
        wish = self._wish(ask)
        share = client.share(ask.cache_salt)
        choose(_marks(ask), ask.cache)
        # Refusals in order of their cost: nothing is fetched before the text fits.
        self.media.check_sources(_sources(ask))
        cuts = ask.rules.truncate_prompt_tokens is not None
        room_read = context_length * (_COUNTED if cuts else 1)
        encoded = await self._fitting(ask, room_read, context_length)
        if isinstance(ask.prompt, Chat) and ask.prompt.files:
            told = len(encoded.tokens)
            (ask,) = await self.with_files([ask], client, room, context_length, told + 1)
            self.media.check_sources(_sources(ask))
            encoded = await self._fitting(ask, room_read, context_length)
        until = self._tags.close if encoded.reasoning == "open" else None
        grammar = None if wish is None else await self._compiler.compile(wish, until, share)
        prompt = await self._shown(ask, encoded, room_read, client, room)
        if kept := len(prompt.tokens) - kept_tokens(ask, len(prompt.tokens), context_length):
            prompt = cut(prompt, kept)
        sampling = self._sampling(ask, len(prompt.tokens), context_length)
        images = tuple(each.image for each in prompt.opened)
        request = Request(
            secrets.token_hex(12),
            prompt.tokens,
            prompt.spans,
            images,
            sampling,
            client.salt(ask.cache_salt),
            arrival,
            share,
            grammar="" if grammar is None else grammar.text,
            caching=replace(
                _caching(ask, prompt),
                prediction=await self.prompts.predicted(ask.prediction),
            ),
            prompt_logprobs=ask.prompt_logprobs,
            rules=ask.rules.tokens(self.tokenizer, self._reasons(ask, prompt)),
            priority=ask.rules.priority,
        )
        return PreparedRequest(
            request,
            prompt.opened,
            prompt.places,
            ask.n,
            self._reading(ask, prompt.reasoning, grammar is not None),
            prompt.landmarks,
            ask.silent,
            tuple(self._ignored(ask)),
        )

    def _reading(self, ask: GenerationRequest, where: Where | None, held: bool) -> ReadAs:
        """The reader of the answers. held: a grammar holds them."""
        offer = _offer(ask)
        calls = offer is not None and offer.open
        return ReadAs(
            where if ask.separate_reasoning else None,
            self.manner.calls if calls else None,
            {} if offer is None else offer.schemas,
            certain=calls and held,
            single=offer is not None and not offer.parallel,
            special=not ask.rules.skip_special_tokens,
            with_stop=ask.rules.include_stop_str_in_output,
            tags=self._tags,
        )

    def _ignored(self, ask: GenerationRequest) -> Iterator[str]:
        """Fields, by their names in the client's API, without a switch in the model."""
        if isinstance(ask.prompt, Chat):
            yield from (ask.names[name] for name in self.prompts.passed_over(ask.prompt))
        if ask.rules.thinking_token_budget is not None and reasoning_tags(self.tokenizer) is None:
            yield "thinking_token_budget"

    def _reasons(self, ask: GenerationRequest, prompt: Prompt) -> bool:
        """True if the answer begins within reasoning. A chat's content may have the tags as text;
        in any other prompt the tags are the client's intent.
        """
        tags = reasoning_tags(self.tokenizer)
        if isinstance(ask.prompt, Chat) or tags is None:
            return prompt.reasoning == "open"
        last = next((token for token in reversed(prompt.tokens) if token in tags), None)
        return last == tags[0]

    def _wish(self, ask: GenerationRequest) -> OutputConstraint | MakeWish | None:
        """The form of the answers, calls included. Raises InvalidRequest for tools that the model
        cannot call.
        """
        offer, form, wish = _offer(ask), self.manner.calls, ask.wish
        if offer is None:
            return wish
        if form is None:
            if offer.open or (offer.held and offer.tools):
                raise InvalidRequest(
                    "tools: this model's chat template shows no way to call them: leave tools out, "
                    'send tool_choice "none", or have the server started with --tool-parser and '
                    "--chat-template",
                    "tools",
                    "unsupported_parameter",
                )
            if offer.held:
                raise InvalidRequest("tool_choice: there are no tools", "tool_choice")
            return wish
        if not offer.held and not (offer.open and wish is not None):
            return wish

        def make(lexicon: LLTokenizer) -> OutputConstraint | None:
            answer = wish(lexicon) if callable(wish) else wish
            style = Style.of(form, lexicon)
            return read_tool_choice(offer.choice, offer.tools, style, offer.parallel, answer)

        return make

    async def read(
        self,
        ask: GenerationRequest,
        context_length: int,
        client: Client = ANYBODY,
        room: MemoryBudget = BOUNDLESS,
    ) -> Prompt:
        """The prompt of `ask`, whose text fits the context; its images may exceed it, within
        reason. Raises a RequestError that names the field.
        """
        choose(_marks(ask), ask.cache)
        (ask,) = await self.with_files([ask], client, room, context_length, most=_COUNTED)
        encoded = await self.prompts.encode(ask, context_length)
        opened = await self.open_all(ask, _sources(ask), client, room)
        encoded = await self._with_videos(ask, encoded, opened, context_length)
        images = [image for each in opened for image in each.images]
        least = sum(each.image.num_tokens for each in images)
        least += len(encoded.tokens) - len(images)
        if least > (_COUNTED if opened else 1) * context_length:
            param = ask.names["messages" if opened else "prompt"]
            raise too_long(param, f"at least {least} tokens", context_length, bool(opened))
        make = partial(self.prompt, ask, encoded, opened)
        return await self.in_thread(make) if least > context_length else make()

    async def with_files(
        self,
        asks: Sequence[GenerationRequest],
        client: Client,
        room: MemoryBudget,
        context_length: int,
        told: int = 0,
        most: int = 1,
    ) -> list[GenerationRequest]:
        """The chat with all files opened: the visible part of each in its place.

        No page is read for a chat whose pages, with `told` tokens beside them, are more than `most`
        contexts. Raises a RequestError that names the field.
        """
        chats = [ask.prompt for ask in asks if isinstance(ask.prompt, Chat)]
        files = files_of(chats)
        if not files:
            return [*asks]

        def fits(tokens: Sequence[int]) -> None:
            of_file = {id(file): count for file, count in zip(files, tokens, strict=True)}
            for ask in asks:
                shown = ask.prompt.files if isinstance(ask.prompt, Chat) else ()
                least = told + sum(of_file[id(file)] for file in shown)
                if shown and least > most * context_length:
                    param = ask.names["messages"]
                    raise too_long(param, f"at least {least} tokens", context_length, True)

        salt = asks[0].cache_salt
        asker = _asker(client, salt, room)
        others = sum(isinstance(each, ImageSource) for chat in chats for each in chat.sources)
        opened = await self.media.open_files(files, client.salt(salt), asker, others, fits)
        parts = parts_of(files, opened)
        return [
            replace(ask, prompt=with_parts(chat, parts))
            if isinstance(chat := ask.prompt, Chat) and chat.files
            else ask
            for ask in asks
        ]

    async def open_all(
        self,
        ask: GenerationRequest,
        sources: Sequence[Source],
        client: Client,
        room: MemoryBudget,
    ) -> tuple[Opened, ...]:
        """These images and videos, for the asking client. Raises a RequestError."""
        asker = _asker(client, ask.cache_salt, room)
        salt = salted(client.salt(ask.cache_salt), ask.adapter)
        return await self.media.open_all(sources, salt, asker)

    async def _shown(
        self,
        ask: GenerationRequest,
        encoded: EncodedPrompt,
        context_length: int,
        client: Client,
        room: MemoryBudget,
    ) -> Prompt:
        """The prompt with its images opened."""
        opened = await self.open_all(ask, _sources(ask), client, room)
        encoded = await self._with_videos(ask, encoded, opened, context_length)
        return self.prompt(ask, encoded, opened)

    async def _with_videos(
        self,
        ask: GenerationRequest,
        encoded: EncodedPrompt,
        opened: Sequence[Opened],
        context_length: int,
    ) -> EncodedPrompt:
        """The prompt with a placeholder for each image of a video, and the text around images."""
        texts = tuple(each.text for each in opened if isinstance(each, OpenedVideo))
        return await self.prompts.encode(ask, context_length, texts) if texts else encoded

    async def _fitting(
        self, ask: GenerationRequest, room_read: int, context_length: int
    ) -> EncodedPrompt:
        """The prompt as tokens, images one each. Raises as `_check_room`."""
        encoded = await self.prompts.encode(ask, room_read)
        self._check_room(ask, kept_tokens(ask, len(encoded.tokens), context_length), context_length)
        return encoded

    def _check_room(self, ask: GenerationRequest, least: int, context_length: int) -> None:
        """Raises InvalidRequest for faults that show before a grammar is compiled or an image is
        fetched. `least`: tokens of the prompt, one per image.
        """
        if least >= context_length and _sources(ask):
            raise too_long(ask.names["messages"], f"at least {least} tokens", context_length, True)
        self._sampling(ask, least, context_length)

    def prompt(
        self, ask: GenerationRequest, encoded: EncodedPrompt, opened: Sequence[Opened]
    ) -> Prompt:
        """The prompt in the engine's terms, of encoded text and opened images."""
        shown = [image for each in opened for image in each.images]
        steps = [step for each in opened for step in each.steps]
        images = [each.image for each in shown]
        try:
            expanded, spans = self.spec.expand_prompt(encoded.tokens, images, steps)
        except InvalidRequest as fault:  # the family knows no client's names
            raise InvalidRequest(fault.message, _prompt_field(ask)) from None
        found = [(self.spec.widened(at, spans, images), mark) for at, mark in encoded.landmarks]
        return Prompt(
            expanded,
            spans,
            tuple(shown),
            tuple(
                source.param
                for source, each in zip(_sources(ask), opened, strict=True)
                for _ in each.images
            ),
            encoded.reasoning,
            _breakpoints(choose(_marks(ask), ask.cache), ask, found, len(expanded)),
            tuple(
                (at, ask.prompt.place_of(mark.message, mark.part))
                for at, mark in found
                if ask.cache.diagnose
                and isinstance(ask.prompt, Chat)
                and (mark.message != TOOLS or (ask.prompt.offer and ask.prompt.offer.tools))
            ),
        )

    def _without_calls(self, bias: Biases) -> Biases:
        """`bias`, and no call begun: forbidden tools stay in the prompt, so that the cached
        beginning serves in both cases.
        """
        tag = self.tokenizer.backend.token_to_id(tool_calls.OPEN)
        if self.manner.calls is None or tag is None:
            return bias
        return (*(each for each in bias if each[0] != tag), (tag, -MAX_BIAS))

    def _sampling(
        self, ask: GenerationRequest, prompt_tokens: int, context_length: int
    ) -> SamplingParams:
        """The request's sampling with nothing left open, and the answer bounded by the rest of the
        context.
        """
        if not prompt_tokens:
            raise InvalidRequest("the prompt is empty", ask.names["prompt"])
        # The answer's room.
        room = context_length - prompt_tokens
        if room < 1:
            chat = isinstance(ask.prompt, Chat)
            raise too_long(_prompt_field(ask), f"{prompt_tokens} tokens", context_length, chat)
        # Defaults for every open field.
        usual = max(self.defaults.max_tokens, ask.sampling.get("min_tokens", 0))
        given = {"max_tokens": usual, "seed": secrets.randbits(63), **ask.sampling}
        if (offer := _offer(ask)) is not None and offer.tools and not offer.open:
            given["logit_bias"] = self._without_calls(given.get("logit_bias", ()))
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
            *ask.rules.named_tokens(),
        ):
            self.check_tokens(name, ids)
        return sampling

    def check_tokens(self, name: str, ids: Sequence[int]) -> None:
        """Raises InvalidRequest, of the field `name`, for a token that the model does not have."""
        size = self.spec.vocab_size
        if outside := [token for token in ids if not 0 <= token < size]:
            raise InvalidRequest(
                f"{name}: token {outside[0]} is not within the vocabulary of {size}", name
            )


def _asker(client: Client, salt: str, room: MemoryBudget) -> Requester:
    return Requester(client.share(salt), client.name, room, client.tenant(salt))


def _caching(ask: GenerationRequest, prompt: Prompt) -> Caching:
    return Caching(prompt.breakpoints, ask.cache.diagnose, ask.cache.family, ask.adapter)


def kept_tokens(ask: GenerationRequest, length: int, context_length: int) -> int:
    """The number of a prompt's tokens left by `truncate_prompt_tokens`."""
    most = ask.rules.truncate_prompt_tokens
    if most is None:
        return length
    room = max(1, context_length - max(1, ask.sampling.get("max_tokens", 1)))
    return min(length, room if most == -1 else most)


def cut(prompt: Prompt, count: int) -> Prompt:
    """The prompt without its first `count` tokens. Raises InvalidRequest if an image would go."""
    if lost := next((span for span in prompt.spans if span.start < count), None):
        left = len(prompt.tokens) - lost.start
        raise InvalidRequest(
            f"truncate_prompt_tokens: {prompt.places[lost.image]} would be cut off: keep at least "
            f"{left} tokens, or leave it out",
            "truncate_prompt_tokens",
        )
    return replace(
        prompt,
        tokens=prompt.tokens[count:],
        spans=tuple(replace(span, start=span.start - count) for span in prompt.spans),
        breakpoints=tuple((at - count, ttl) for at, ttl in prompt.breakpoints if at > count),
        landmarks=tuple((at - count, place) for at, place in prompt.landmarks if at > count),
    )


def _breakpoints(
    marks: Sequence[Mark],
    ask: GenerationRequest,
    found: Sequence[tuple[int, Landmark]],
    length: int,
) -> tuple[tuple[int, int], ...]:
    """Tokens and seconds of marks, by tokens; of several at one place, the longest."""
    ends = {(each.message, each.part): at for at, each in found}
    points: dict[int, int] = {}
    for mark in marks:
        message = TOOLS if mark.message is None else mark.message
        if mark.place == ask.cache.place:
            at = length
        elif mark.part is not None or mark.message is None:
            at = ends.get((message, mark.part), 0)
        else:  # after all of it that the template shows
            at = max((at for at, each in found if each.message <= message), default=0)
        if at:
            points[at] = max(points.get(at, 0), mark.seconds or ask.cache.default)
    return tuple(sorted(points.items()))


def _prompt_field(ask: GenerationRequest) -> str:
    """The client's name for what holds the prompt."""
    return ask.names["messages" if isinstance(ask.prompt, Chat) else "prompt"]


def _sources(ask: GenerationRequest) -> Sequence[Source]:
    return ask.prompt.sources if isinstance(ask.prompt, Chat) else ()


def _marks(ask: GenerationRequest) -> Sequence[Mark]:
    return ask.prompt.marks if isinstance(ask.prompt, Chat) else ()


def _offer(ask: GenerationRequest) -> ToolSet | None:
    return ask.prompt.offer if isinstance(ask.prompt, Chat) else None
