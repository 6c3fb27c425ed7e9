"""Converts a chat, a text or token ids to the model's tokens.

A chat is rendered with the chat template. The placeholder of each video is then replaced with the
text for the video's frames.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from saccade.core.errors import InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.types import (
    CHAT_NAMES,
    MAX_LOGPROBS,
    NO_ADAPTER,
    AdapterRef,
    FieldNames,
    check_sampling,
)
from saccade.core.video import VideoRules
from saccade.front.breakpoints import NO_CACHE_REQUEST, CacheRequest
from saccade.front.conversation import NO_CHAT, Chat
from saccade.front.extras import Extras
from saccade.front.fields import too_long
from saccade.text.answer import reasoning
from saccade.text.answer.answer_format import AnswerFormat
from saccade.text.answer.reasoning import Where
from saccade.text.prompt.special_tokens import Literals, Rendered
from saccade.text.prompt.template import ChatTemplate, Tokenizer, TooManyTokens

if TYPE_CHECKING:
    from saccade.front.answer_rules import AnswerRules
    from saccade.text.grammar.constraint import OutputConstraint
    from saccade.text.prompt.message_offsets import MessageOffset

T = TypeVar("T")

_LONG_TEXT = 8_000
"""Prompts with more characters than this are rendered and tokenized in a thread. This many take
about 5 ms.
"""
PREDICTED_CHARS = 16_384
"""How many characters at the start of a predicted answer are used."""

_MANY_MESSAGES = 100

_SLACK = 16
"""A template may leave out most of a chat's content. A chat with more than this many times the text
that fits in the context is rejected without being rendered.
"""

_READERS = 2
"""Number of threads for large bodies and long prompts. With more, the event loop would wait longer
for the GIL, because each of them may get it first.
"""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request for `n` answers to one prompt.

    Raises InvalidRequest for a sampling field out of bounds, before any image is fetched.
    """

    # the prompt
    prompt: Chat | str | tuple[int, ...]  # the chat, a text, or token ids
    # fields of `SamplingParams` that the client set; `prepare` adds the defaults
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1  # number of answers
    cache_salt: str = ""
    # whether the tokenizer adds its special tokens, such as BOS; None: only if the prompt is a text
    add_special_tokens: bool | None = None
    # the answers
    silent: bool = False  # report only how each answer ends
    constraint: OutputConstraint | None = None  # structured output; None: any text
    separate_reasoning: bool = True  # report reasoning separately from the text
    # cache settings, in addition to the breakpoints in a chat
    cache: CacheRequest = NO_CACHE_REQUEST
    prompt_logprobs: int | None = None  # as in `Request`
    names: FieldNames = CHAT_NAMES  # names of the fields in the client's API, for error messages
    rules: AnswerRules | None = None
    adapter: AdapterRef = NO_ADAPTER
    prediction: str = ""  # text that the client expects in the answers
    page_text: str = ""  # the text of PDF pages that are shown only as images
    template: ChatTemplate | None = None  # renders the chat instead of the checkpoint's template
    extras: Extras = ()  # values for plugins

    def __post_init__(self) -> None:
        check_sampling(self.sampling, self.names)
        if not 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs: expected None or a whole number from 0 to {MAX_LOGPROBS}, got "
                f"{self.prompt_logprobs}",
                "prompt_logprobs",
            )

    @property
    def chat(self) -> Chat:
        """The conversation. It is empty if the prompt is a text or token ids."""
        return self.prompt if isinstance(self.prompt, Chat) else NO_CHAT

    @property
    def held(self) -> bool:
        """True if a grammar constrains the answers, because of structured output or tool calls."""
        tools = self.chat.tools
        return self.constraint is not None or (tools is not None and tools.held)

    @property
    def field(self) -> str:
        """The name of the field that contains the prompt in the client's API."""
        return self.names["messages" if isinstance(self.prompt, Chat) else "prompt"]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens, with a single token for each image."""

    tokens: list[int]
    reasoning: Where | None = None  # as in `Prompt`
    message_offsets: tuple[tuple[int, MessageOffset], ...] = ()  # as in `Prompt`


class PromptEncoder:
    """Renders and tokenizes prompts for one model."""

    def __init__(
        self,
        spec: FamilySpec,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        answer_format: AnswerFormat,
    ) -> None:
        """Create an encoder. The arguments are those of `InputProcessor`."""
        self._spec = spec
        self._tokenizer = tokenizer
        self.template = template
        self._answer_format = answer_format
        self._literals = Literals(tokenizer)
        self._readers = ThreadPoolExecutor(_READERS, "saccade-reader")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result, so that the event loop can serve other
        requests.
        """
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def encode(
        self, request: GenerationRequest, context_length: int, videos: Sequence[str] = ()
    ) -> EncodedPrompt:
        """Tokenize a prompt as `encode_now` does, in a thread if the prompt is long."""
        encode = partial(self.encode_now, request, context_length, videos)
        long = takes_long(request) or sum(map(len, videos)) > _LONG_TEXT
        return await self.in_thread(encode) if long else encode()

    def encode_now(
        self, request: GenerationRequest, context_length: int, videos: Sequence[str] = ()
    ) -> EncodedPrompt:
        """Tokenize the prompt of a request, with a single token for each image.

        videos: the text for the frames of each video. If empty, a single placeholder is used for
        each video. Raises InvalidRequest that names the field.
        """
        if isinstance(prompt := request.prompt, tuple):
            return EncodedPrompt(self._check_tokens(prompt, request.names["prompt"]))
        if isinstance(prompt, Chat):
            return self._encode_chat(prompt, request, context_length, videos)
        special = request.add_special_tokens is not False
        return EncodedPrompt(self._encode(prompt, request.names["prompt"], context_length, special))

    async def predicted(self, prediction: str) -> tuple[int, ...]:
        """Tokenize at most `PREDICTED_CHARS` characters of a predicted answer."""
        text = prediction[:PREDICTED_CHARS]
        encode = partial(self._tokenizer.encode, text, False, PREDICTED_CHARS)
        return tuple(await self.in_thread(encode) if len(text) > _LONG_TEXT else encode())

    def render(self, chat: Chat, request: GenerationRequest, context_length: int) -> Rendered:
        """Render a chat. Raises InvalidRequest if it is certain to exceed the context."""
        return self._render(self._given(chat, request, context_length))

    def tokens_of(
        self, rendered: Rendered, param: str, context_length: int, special: bool = False
    ) -> list[int]:
        """Tokenize a rendered chat or a part of it. special: add the tokenizer's special tokens.

        Raises InvalidRequest that names `param` if it exceeds the context.
        """
        self._check_length(rendered.text, param, context_length, True)
        try:
            return self._literals.encode(rendered, special, context_length)
        except TooManyTokens as error:
            raise too_long(param, str(error), context_length, True) from None

    def known_tokens(
        self, rendered: Rendered, known: int, request: GenerationRequest, context_length: int
    ) -> list[int]:
        """Tokenize a rendered chat, and return the tokens that end within its first `known`
        characters.
        """
        special = bool(request.add_special_tokens)
        tokens = self.tokens_of(rendered, request.names["messages"], context_length, special)
        ends = accumulate(self._literals.ends(rendered, special), max)
        return tokens[: bisect_right([*ends], known)]

    def _check_tokens(self, tokens: tuple[int, ...], param: str) -> list[int]:
        if outside := [token for token in tokens if token >= self._spec.vocab_size]:
            raise InvalidRequest(
                f"{param}: token {outside[0]} is not below the vocabulary size, "
                f"{self._spec.vocab_size}",
                param,
            )
        return list(tokens)

    def _encode(self, text: str, param: str, context_length: int, special: bool) -> list[int]:
        self._check_length(text, param, context_length)
        try:
            return self._tokenizer.encode(text, special, context_length)
        except TooManyTokens as error:
            raise too_long(param, str(error), context_length) from None

    def _encode_chat(
        self,
        chat: Chat,
        request: GenerationRequest,
        context_length: int,
        videos: Sequence[str] = (),
    ) -> EncodedPrompt:
        """Render and tokenize a chat. Also find where its parts end, if the request has cache
        breakpoints or requests cache diagnostics.
        """
        special = bool(request.add_special_tokens)
        given = self._given(chat, request, context_length)
        rendered = plain = self._render(given)
        moved: Callable[[int], int] = int
        if chat.media and self._spec.video is not None and chat.videos:
            rendered, moved = self._insert_videos(plain, chat, self._spec.video, videos)
        tokens = self.tokens_of(rendered, request.names["messages"], context_length, special)
        where = self._reasoning_at(chat, rendered.text)
        if not (chat.marks or request.cache.diagnose):
            return EncodedPrompt(tokens, where)
        from saccade.text.prompt import message_offsets

        messages, places = message_offsets.flagged(given["messages"])
        try:
            flagged = self._render({**given, "messages": messages}).text
        except InvalidRequest:  # the template compares a text with fixed ones
            flagged = ""
        found = message_offsets.find_offsets(plain.text, flagged, places)
        ends = list(accumulate(self._literals.ends(rendered, special), max))
        return EncodedPrompt(
            tokens, where, tuple((bisect_right(ends, moved(each.end)), each) for each in found)
        )

    def _insert_videos(
        self, plain: Rendered, chat: Chat, rules: VideoRules, videos: Sequence[str]
    ) -> tuple[Rendered, Callable[[int], int]]:
        """Replace the placeholder of each video with the text for its frames. If `videos` is empty,
        the frames are not known yet, and a single placeholder is inserted.

        Also returns a function that maps offsets in `plain` to offsets in the result. Raises
        InvalidRequest if the template does not show videos as the model expects.
        """
        marks = rules.marks
        mark = next((mark for mark in marks if plain.marked.count(mark) == len(chat.videos)), None)
        if mark is None:
            param = chat.videos[0].param
            raise InvalidRequest(
                f"{param}: this model's chat template does not show videos: send frames as "
                "images, or ask the operator to start the server with another --chat-template",
                param,
                "no_video",
            )
        texts = videos or [marks[-1]] * len(chat.videos)
        replacements = [rules.begin(number) + text for number, text in enumerate(texts)]
        starts = [found.start() for found in re.finditer(re.escape(mark), plain.marked)]
        grown = [*accumulate((len(text) - len(mark) for text in replacements), initial=0)]
        rendered = Rendered(
            _replaced(plain.text, starts, len(mark), replacements),
            _replaced(plain.marked, starts, len(mark), replacements),
        )
        return rendered, lambda at: at + grown[bisect_left(starts, at)]

    def _given(self, chat: Chat, request: GenerationRequest, context_length: int) -> dict[str, Any]:
        """Return the arguments for the template. Raises InvalidRequest if the chat is certain to
        exceed the context.
        """
        if chat.num_characters > _SLACK * context_length * self._tokenizer.longest_token:
            has = f"{chat.num_characters} characters"
            raise too_long(request.names["messages"], has, context_length, True)
        messages = [message.for_template() for message in chat.messages]
        tools = None
        offered = chat.tools
        if offered is not None and self._answer_format.calls is not None and not offered.hidden:
            tools = [tool.for_template() for tool in offered.tools] or None
        template = request.template or self.template
        if (hidden := template.hidden(messages, tools)) is not None:
            place = chat.place_of(*hidden)
            raise InvalidRequest(
                f"{place}: this model's chat template joins texts and cannot place an image or a "
                "video in this message: ask the operator to start the server with another "
                "--chat-template",
                place,
                "no_place_for_media",
            )
        return {
            "template": template,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "variables": self._variables(chat) if chat.has_switches else chat.variables,
            "names": request.names,
        }

    def _render(self, given: Any) -> Rendered:
        return self._literals.render(**given)

    def _variables(self, chat: Chat) -> Mapping[str, Any]:
        """Return the template's variables: those of the client, and those that control reasoning
        effort, verbosity and thinking.
        """
        given: dict[str, Any] = {"verbosity": chat.verbosity, "enable_thinking": chat.thinks}
        names = self.template.names
        if "reasoning_effort" in names:
            given["reasoning_effort"] = chat.effort
        elif chat.effort is not None and chat.thinks is None:
            given["enable_thinking"] = chat.effort != "none"
        if {"reasoning_effort", "enable_thinking"} & chat.variables.keys():
            given = {"verbosity": chat.verbosity}
        known = {name: each for name, each in given.items() if name in names and each is not None}
        return {**known, **chat.variables}

    def ignored(self, chat: Chat) -> Iterator[str]:
        """Yield those fields of the request that the model's template does not support.

        A request to turn reasoning off is not ignored by a model that never reasons.
        """
        names, reasons = self.template.names, self._answer_format.reasoning is not None
        if chat.verbosity not in (None, "medium") and "verbosity" not in names:
            yield "verbosity"
        wanted = chat.effort is not None and (reasons or chat.effort != "none")
        if wanted and not {"reasoning_effort", "enable_thinking"} & names:
            yield "reasoning_effort"
        wanted = chat.thinks is not None and (reasons or chat.thinks)
        if wanted and "enable_thinking" not in names:
            yield "thinking"

    def _reasoning_at(self, chat: Chat, text: str) -> Where | None:
        if (tags := self._answer_format.reasoning) is None:
            return None
        if not chat.continue_final_message:
            return reasoning.reasoning_at(text, tags)
        last = text[text.rfind(tags.open) :]
        return "open" if last.startswith(tags.open) and tags.close not in last else "closed"

    def _check_length(self, text: str, param: str, context_length: int, chat: bool = False) -> None:
        """Raise InvalidRequest if the text cannot fit in the context, however it is tokenized."""
        least = -(-len(text) // self._tokenizer.longest_token)
        if least > context_length:
            has = f"{len(text)} characters, so at least {least} tokens"
            raise too_long(param, has, context_length, chat)


def takes_long(request: GenerationRequest) -> bool:
    """Return True if the prompt is so long that it should be rendered and tokenized in a thread."""
    if isinstance(prompt := request.prompt, Chat):
        return len(prompt.messages) > _MANY_MESSAGES or prompt.num_characters > _LONG_TEXT
    return len(prompt) > _LONG_TEXT


def _replaced(text: str, starts: Sequence[int], length: int, replacements: Sequence[str]) -> str:
    ends = [0, *(start + length for start in starts)]
    between = [text[end:start] for end, start in zip(ends, [*starts, len(text)])]
    return "".join(piece for pair in zip(between, [*replacements, ""]) for piece in pair)
