"""From a client's request to the engine's: `InputProcessor.prepare`.

Owns the order of the steps, cheap refusals first: template, tokens, limits, grammar, images named
(not decoded), placeholders widened to spans, sampling with every default filled in. Knows nothing
of HTTP and nothing of the engine but its context length.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from llguidance import LLTokenizer

from saccade.core.client import ANYBODY, Client
from saccade.core.errors import InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.types import (
    CHAT_NAMES,
    LARGEST,
    MAX_BIAS,
    MAX_LOGPROBS,
    Caching,
    FieldNames,
    Request,
    SamplingParams,
    Span,
    check_sampling,
)
from saccade.front.breakpoints import NO_WISH, CacheWish, Mark, choose
from saccade.front.compiler import Compiler, MakeWish
from saccade.front.conversation import Chat
from saccade.front.fields import too_long
from saccade.media.fairness import BOUNDLESS, MemoryBudget, Requester
from saccade.media.media import ImageSource, Media, OpenedImage
from saccade.text import message_offsets as landmarks
from saccade.text import reasoning, tool_calls
from saccade.text.answer import PLAIN, ReadAs
from saccade.text.answer_format import SILENT, AnswerFormat
from saccade.text.grammar import OutputConstraint
from saccade.text.message_offsets import TOOLS, Landmark
from saccade.text.prompt import ChatTemplate, Tokenizer, TooManyTokens
from saccade.text.reasoning import Where
from saccade.text.special_tokens import Literals, Rendered
from saccade.text.tool_grammar import Style, read_tool_choice
from saccade.text.tools import NO_TOOLS, ToolSet

T = TypeVar("T")
Biases = tuple[tuple[int, float], ...]

_LONG_TEXT = 8_000
"""Characters beyond which a prompt is rendered and tokenised in a thread (about 5 ms)."""

_MANY_MESSAGES = 100

_SLACK = 16
"""A template may leave out most of what a chat holds. Text of so many times what the context can
hold is refused all the same.
"""

_COUNTED = 8
"""A prompt is counted, though it will not be answered, up to so many times the context of images.
"""

_READERS = 2
"""Threads that read large bodies and long prompts. More would take more turns from the event loop,
which waits for each of them to let go of the interpreter.
"""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's wish: `n` answers to one prompt (a chat, a text, or token ids).

    `add_special_tokens`: add the tokenizer's tokens around a bare text; None: for texts, not for
    chats. `silent`: of the answers only their ends are told. `sampling` holds the fields of
    `SamplingParams` set by the client; the rest get their defaults in `prepare`. Raises like
    `SamplingParams`: a field out of bounds is refused before an image is fetched. `wish`: the form
    of the answers; None: any text. `separate_reasoning`: reasoning is told apart from text, if the
    model reasons. `prompt_logprobs`: as in `Request`. `cache`: wishes for the caches, beside the
    marks in a chat. `names`: the client's API's names of the fields, for refusals.
    """

    prompt: Chat | str | tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    cache_salt: str = ""
    add_special_tokens: bool | None = None
    silent: bool = False
    wish: OutputConstraint | MakeWish | None = None
    separate_reasoning: bool = True
    cache: CacheWish = NO_WISH
    prompt_logprobs: int | None = None
    names: FieldNames = CHAT_NAMES

    def __post_init__(self) -> None:
        check_sampling(self.sampling, self.names)
        if not 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs: expected None or a whole number from 0 to {MAX_LOGPROBS}, got "
                f"{self.prompt_logprobs}",
                "prompt_logprobs",
            )


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
class EncodedPrompt:
    """A chat as tokens, one token per image. landmarks: as in `Prompt`, with their places in the
    chat.
    """

    tokens: list[int]
    reasoning: Where | None = None
    landmarks: tuple[tuple[int, Landmark], ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can go to the engine, and how many answers are wanted (their seeds count up
    from the first).

    `opened[i]` is `request.images[i]`, and `places[i]` is what the client calls it, e.g.
    "messages[2].content[0]". `reading`: how the answers are to be read. `landmarks`: as in
    `Prompt`. `silent`: as in `GenerationRequest`. `ignored`: fields that the model has no switch
    for.
    """

    request: Request
    opened: tuple[OpenedImage, ...] = ()
    places: tuple[str, ...] = ()
    n: int = 1
    reading: ReadAs = PLAIN
    landmarks: tuple[tuple[int, str], ...] = ()
    silent: bool = False
    ignored: tuple[str, ...] = ()


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
        """`special_tokens_in_content`: read special tokens in clients' messages as such.
        `compiler`: None: one of the tokenizer's own vocabulary. `manner`: the model's way to write
        calls and reasoning.
        """
        self.spec = spec
        self.tokenizer = tokenizer
        self.template = template
        self.media = media
        self.defaults = defaults
        self.manner = manner
        self._compiler = compiler or Compiler(
            tokenizer.backend.to_str(), spec.vocab_size, spec.eos_token_ids
        )
        self._literals = None if special_tokens_in_content else Literals(tokenizer)
        self._readers = ThreadPoolExecutor(_READERS, "saccade-reader")

    @property
    def usual_length(self) -> str:
        """The length of an answer whose request names no limit, for people."""
        most = self.defaults.max_tokens
        return "as long as the context allows" if most == LARGEST else f"{most} tokens at most"

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of long work, run beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def prepare(
        self,
        ask: GenerationRequest,
        context_length: int,
        client: Client = ANYBODY,
        room: MemoryBudget = BOUNDLESS,
    ) -> PreparedRequest:
        """Everything about `ask` that can be decided without decoding a picture.

        `room`: where bytes that were not sent with it are counted. Raises a RequestError that
        names the field.
        """
        arrival = time.monotonic()
        wish, offer = self._wish(ask), _offer(ask)
        share = client.share(ask.cache_salt)
        choose(_marks(ask), ask.cache)
        # Refusals in order of their cost: nothing is fetched before the text fits.
        self.media.check_sources(_sources(ask))
        encoded = await self._encoded(ask, context_length)
        self._check_room(ask, len(encoded.tokens), context_length)
        until = reasoning.CLOSE if encoded.reasoning == "open" else None
        grammar = None if wish is None else await self._compiler.compile(wish, until, share)
        prompt = self.prompt(ask, encoded, await self._open(ask, client, room))
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
            caching=Caching(
                prompt.breakpoints, ask.cache.diagnose, ask.cache.family, client.salt("")
            ),
            prompt_logprobs=ask.prompt_logprobs,
        )
        # How the answer will be read.
        reading = ReadAs(
            prompt.reasoning if ask.separate_reasoning else None,
            self.manner.calls if offer.open else None,
            offer.schemas,
            certain=offer.open and grammar is not None,
            single=not offer.parallel,
        )
        return PreparedRequest(
            request,
            prompt.opened,
            prompt.places,
            ask.n,
            reading,
            prompt.landmarks,
            ask.silent,
            tuple(ask.names[name] for name in self._passed_over(ask.prompt))
            if isinstance(ask.prompt, Chat)
            else (),
        )

    def _wish(self, ask: GenerationRequest) -> OutputConstraint | MakeWish | None:
        """The form of the answers, calls included. Raises InvalidRequest for tools that the model
        cannot call.
        """
        offer, form, wish = _offer(ask), self.manner.calls, ask.wish
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
        encoded = await self._encoded(ask, context_length)
        opened = await self._open(ask, client, room)
        least = sum(each.image.num_tokens for each in opened)
        least += len(encoded.tokens) - len(opened)
        if least > (_COUNTED if opened else 1) * context_length:
            param = ask.names["messages" if opened else "prompt"]
            raise too_long(param, f"at least {least} tokens", context_length, bool(opened))
        make = partial(self.prompt, ask, encoded, opened)
        return await self.in_thread(make) if least > context_length else make()

    async def _open(
        self, ask: GenerationRequest, client: Client, room: MemoryBudget
    ) -> tuple[OpenedImage, ...]:
        asker = Requester(client.share(ask.cache_salt), client.name, room)
        return await self.media.open_all(_sources(ask), client.salt(ask.cache_salt), asker)

    async def _encoded(self, ask: GenerationRequest, context_length: int) -> EncodedPrompt:
        encode = partial(self.encode, ask, context_length)
        return await self.in_thread(encode) if takes_long(ask) else encode()

    def encode(self, ask: GenerationRequest, context_length: int) -> EncodedPrompt:
        """The prompt as tokens, each image one. Raises InvalidRequest that names the field."""
        if isinstance(prompt := ask.prompt, tuple):
            return EncodedPrompt(self._check_tokens(prompt, ask.names["prompt"]))
        if isinstance(prompt, Chat):
            locate = bool(prompt.marks) or ask.cache.diagnose
            special = bool(ask.add_special_tokens)
            return self._encode_chat(prompt, ask, context_length, special, locate)
        special = ask.add_special_tokens is not False
        return EncodedPrompt(self._encode(prompt, ask.names["prompt"], context_length, special))

    def _check_room(self, ask: GenerationRequest, least: int, context_length: int) -> None:
        """Raises InvalidRequest for faults that show before a grammar is compiled or an image is
        fetched. `least`: tokens of the prompt, one per image.
        """
        if least >= context_length and _sources(ask):
            raise too_long(ask.names["messages"], f"at least {least} tokens", context_length, True)
        self._sampling(ask, least, context_length)

    def prompt(
        self, ask: GenerationRequest, encoded: EncodedPrompt, opened: tuple[OpenedImage, ...]
    ) -> Prompt:
        """The prompt in the engine's terms, of what `encode` and opening images have brought."""
        images = [each.image for each in opened]
        expanded, spans = self.spec.expand_prompt(encoded.tokens, images)
        found = [(self.spec.widened(at, spans), mark) for at, mark in encoded.landmarks]
        return Prompt(
            expanded,
            spans,
            opened,
            tuple(source.param for source in _sources(ask)),
            encoded.reasoning,
            _breakpoints(choose(_marks(ask), ask.cache), ask, found, len(expanded)),
            tuple(
                (at, ask.prompt.place_of(mark.message, mark.part))
                for at, mark in found
                if ask.cache.diagnose
                and isinstance(ask.prompt, Chat)
                and (mark.message != TOOLS or ask.prompt.offer.tools)
            ),
        )

    def _check_tokens(self, tokens: tuple[int, ...], param: str) -> list[int]:
        if outside := [token for token in tokens if token >= self.spec.vocab_size]:
            raise InvalidRequest(
                f"{param}: token {outside[0]} is not below the vocabulary size, "
                f"{self.spec.vocab_size}",
                param,
            )
        return list(tokens)

    def _encode(self, text: str, param: str, context_length: int, special: bool) -> list[int]:
        self._check_length(text, param, context_length)
        try:
            return self.tokenizer.encode(text, special, context_length)
        except TooManyTokens as error:
            raise too_long(param, str(error), context_length) from None

    def _encode_chat(
        self, chat: Chat, ask: GenerationRequest, context_length: int, special: bool, locate: bool
    ) -> EncodedPrompt:
        """A chat as tokens. `locate`: find the ends of its parts."""
        given = self._given(chat, ask)
        rendered = self.render(chat, ask, context_length)
        tokens = self.tokens_of(rendered, ask.names["messages"], context_length, special)
        where = self._reasoning_at(chat, rendered.text) if self.manner.reasons else None
        if not locate:
            return EncodedPrompt(tokens, where)
        # Where parts end: by a second rendering with marks.
        messages, places = landmarks.flagged(given["messages"])
        try:
            flagged = self._render({**given, "messages": messages}).text
        except InvalidRequest:  # of a template that knows some texts by heart
            flagged = ""
        found = landmarks.find(rendered.text, flagged, places)
        ends = (
            self.tokenizer.ends(rendered.text, special)
            if self._literals is None
            else self._literals.ends(rendered, special)
        )
        ends = list(accumulate(ends, max))
        return EncodedPrompt(
            tokens, where, tuple((bisect_right(ends, each.end), each) for each in found)
        )

    def render(self, chat: Chat, ask: GenerationRequest, context_length: int) -> Rendered:
        """A chat's text. Raises InvalidRequest for more than the context can hold."""
        param = ask.names["messages"]
        if chat.num_characters > _SLACK * context_length * self.tokenizer.longest_token:
            raise too_long(param, f"{chat.num_characters} characters", context_length, True)
        rendered = self._render(self._given(chat, ask))
        self._check_length(rendered.text, param, context_length, True)
        return rendered

    def tokens_of(
        self, rendered: Rendered, param: str, context_length: int, special: bool = False
    ) -> list[int]:
        """Of a chat's text, or of a part of it. Raises InvalidRequest that names `param`."""
        try:
            if self._literals is None:
                return self.tokenizer.encode(rendered.text, special, context_length)
            return self._literals.encode(rendered, special, context_length)
        except TooManyTokens as error:
            raise too_long(param, str(error), context_length, True) from None

    def _given(self, chat: Chat, ask: GenerationRequest) -> dict[str, Any]:
        """What the template is given."""
        tools = [tool.for_template() for tool in chat.offer.tools]
        return {
            "messages": [message.for_template() for message in chat.messages],
            "tools": (tools or None) if self.manner.calls is not None else None,
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "variables": self._variables(chat),
            "names": ask.names,
        }

    def _render(self, given: Any) -> Rendered:
        if self._literals is not None:
            return self._literals.render(self.template, **given)
        text = self.template.render(**given)
        return Rendered(text, text)

    def _variables(self, chat: Chat) -> Mapping[str, Any]:
        """The template's variables: the client's own, and those for effort, verbosity and
        thinking.
        """
        wishes: dict[str, Any] = {"verbosity": chat.verbosity, "enable_thinking": chat.thinks}
        names = self.template.names
        if "reasoning_effort" in names:
            wishes["reasoning_effort"] = chat.effort
        elif chat.effort is not None and chat.thinks is None:
            wishes["enable_thinking"] = chat.effort != "none"
        if {"reasoning_effort", "enable_thinking"} & chat.variables.keys():
            wishes = {"verbosity": chat.verbosity}
        known = {name: wish for name, wish in wishes.items() if name in names and wish is not None}
        return {**known, **chat.variables}

    def _passed_over(self, chat: Chat) -> Iterator[str]:
        """Fields of a request without a counterpart in this model's template. A model without
        reasoning passes over no wish for less of it.
        """
        names, reasons = self.template.names, self.manner.reasons
        if chat.verbosity not in (None, "medium") and "verbosity" not in names:
            yield "verbosity"
        wanted = chat.effort is not None and (reasons or chat.effort != "none")
        if wanted and not {"reasoning_effort", "enable_thinking"} & names:
            yield "reasoning_effort"
        wanted = chat.thinks is not None and (reasons or chat.thinks)
        if wanted and "enable_thinking" not in names:
            yield "thinking"

    def _reasoning_at(self, chat: Chat, text: str) -> Where:
        if not chat.continue_final_message:
            return reasoning.reasoning_at(text)
        last = text[text.rfind(reasoning.OPEN) :]
        return (
            "open" if last.startswith(reasoning.OPEN) and reasoning.CLOSE not in last else "closed"
        )

    def _check_length(self, text: str, param: str, context_length: int, chat: bool = False) -> None:
        """Raises InvalidRequest for a text too long for the context, whatever its tokens are."""
        least = -(-len(text) // self.tokenizer.longest_token)
        if least > context_length:
            has = f"{len(text)} characters, so at least {least} tokens"
            raise too_long(param, has, context_length, chat)

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
            param = ask.names["messages" if chat else "prompt"]
            raise too_long(param, f"{prompt_tokens} tokens", context_length, chat)
        # Defaults for every open field.
        usual = max(self.defaults.max_tokens, ask.sampling.get("min_tokens", 0))
        given = {"max_tokens": usual, "seed": secrets.randbits(63), **ask.sampling}
        if (offer := _offer(ask)).tools and not offer.open:
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


def takes_long(ask: GenerationRequest) -> bool:
    """Whether its prompt is to be rendered and tokenised in a thread."""
    if isinstance(prompt := ask.prompt, Chat):
        return len(prompt.messages) > _MANY_MESSAGES or prompt.num_characters > _LONG_TEXT
    return len(prompt) > _LONG_TEXT


def _sources(ask: GenerationRequest) -> Sequence[ImageSource]:
    return ask.prompt.sources if isinstance(ask.prompt, Chat) else ()


def _marks(ask: GenerationRequest) -> Sequence[Mark]:
    return ask.prompt.marks if isinstance(ask.prompt, Chat) else ()


def _offer(ask: GenerationRequest) -> ToolSet:
    return ask.prompt.offer if isinstance(ask.prompt, Chat) else NO_TOOLS
