"""OpenAI's request bodies: fields, checks and errors.

Owns the fields of each body, by topic. A field that is unknown or unsupported is a 400 that names
it; fields that would change the answer are never ignored. Messages are
`front/content.py`'s, `body_schema.py` reads the fields, `read.py` makes requests of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

from saccade.api.body_schema import BodySchema
from saccade.api.restraint import Restraint
from saccade.core.errors import InvalidRequest
from saccade.core.types import MAX_LOGPROBS
from saccade.front.breakpoints import (
    CacheControl,
    CacheRequest,
    PromptCacheOptions,
    read_cache_request,
)
from saccade.front.fields import Integer, Natural, unsupported
from saccade.front.part_defaults import NO_DEFAULTS, DocumentOptions, ImageLimits, PartDefaults
from saccade.front.unread_fields import AnyFields
from saccade.front.video_parts import MediaReading

NO_LIMIT = -1
"""`max_tokens` of llama.cpp's and LM Studio's clients that want none."""
MAX_CHOICES = 128
"""Answers that one request may ask for: prompts times `n`."""

MAX_SALT = 256
"""Characters of a `cache_salt`."""

MAX_CACHE_KEY = 1024
"""Characters of a `prompt_cache_key`."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Obfuscation(Struct, forbid_unknown_fields=True):
    """How to stream."""

    include_obfuscation: bool | None = None


class StreamOptions(Obfuscation, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: bool = False
    """The stream ends with a chunk that reports usage."""
    continuous_usage_stats: bool = False
    """With include_usage, every chunk reports usage so far."""


class SaccadeOptions(DocumentOptions, forbid_unknown_fields=True):
    """Fields that only this server has."""

    trace: bool = False
    """Report where the server found each image, why not sooner, and at what cost."""


class Sampling(Struct, kw_only=True):
    """How tokens are sampled. A missing field takes the default from the checkpoint's
    generation_config.json, or else OpenAI's.

    `Sampling` and `Ending` only have types. `SamplingParams` has the bounds.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    """Sample only from this many of the likeliest tokens. 0 and -1 remove the limit."""
    min_p: float | None = None
    """Minimum probability for sampling, as a share of the likeliest token's."""
    repetition_penalty: float | None = None
    """Values above 1 make tokens of the prompt and the answer less likely."""
    presence_penalty: float | None = None
    """Subtracted from the logit of each token already in the answer."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit for each time it is in the answer."""
    seed: Integer | None = None
    """Seeds every random draw. The same seed and request give the same answer."""
    logit_bias: dict[Integer, float] | None = None


class Stops(Struct, kw_only=True):
    """When an answer ends, but for its length."""

    min_tokens: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None


class Ending(Stops, kw_only=True):
    """When an answer ends."""

    max_tokens: Integer | None = None
    """Maximum tokens of an answer. With -1, only the context limits it. With 0, the server computes
    and caches the prompt without an answer.
    """


class RequestScope(Struct, kw_only=True):
    """The answering model, and the requests that share its caches. `model` left out: the server's
    own.
    """

    model: str | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None

    @property
    def salt(self) -> str:
        return self.cache_salt or ""


class Reply(RequestScope, kw_only=True):
    """The answering model, the number of answers, and their form."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Number of answers to each prompt. The server computes the prompt once."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    saccade: SaccadeOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options.continuous_usage_stats  # type: ignore[union-attr]

    @property
    def trace(self) -> bool:
        return self.saccade is not None and self.saccade.trace


class Streamed(Protocol):
    """Fields of an answer that may be streamed. (A Struct has one base with fields.)"""

    @property
    def stream(self) -> bool | None: ...
    @property
    def stream_options(self) -> Obfuscation | None: ...


def check_stream(fields: Streamed) -> None:
    """Raise InvalidRequest for options without a stream, and for those that are unsupported."""
    if fields.stream_options is None:
        return
    if not fields.stream:
        message = "stream_options is only allowed together with stream=true"
        raise InvalidRequest(message, "stream_options")
    if fields.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")


class NamedCaching(Struct, kw_only=True):
    """Wishes for the caches for the whole prompt, in fields that OpenAI's dialects have alike."""

    prompt_cache_key: Annotated[str, Meta(max_length=MAX_CACHE_KEY)] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def cache_request(self) -> CacheRequest:
        """Read the cache settings. Raises InvalidRequest for an invalid lifetime."""
        return read_cache_request(
            None, self.prompt_cache_options, None, False, self.prompt_cache_key or ""
        )


class CachedCaching(NamedCaching, kw_only=True):
    """The same for answers, with a time and with diagnostics."""

    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_diagnostics: bool | dict[str, Any] | None = None

    @property
    def cache_request(self) -> CacheRequest:
        """Read the cache settings. Raises InvalidRequest for an invalid lifetime."""
        return self.read(None)

    @property
    def compared(self) -> str | None:
        """Return the response to compare with for diagnostics."""
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id

    def read(self, control: CacheControl | None) -> CacheRequest:
        return read_cache_request(
            control,
            self.prompt_cache_options,
            self.prompt_cache_retention,
            self.prompt_cache_diagnostics not in (None, False),
            self.prompt_cache_key or "",
        )


class PromptCaching(CachedCaching, kw_only=True):
    """Wishes for the caches for the whole prompt. `front/breakpoints.py` reads marks on parts,
    messages and tools.

    prompt_cache_key: a name for prompts with a common prefix. A single server does not
    route. `cache_salt` and the key decide sharing, and the name only selects the earlier prompts
    that diagnostics compare. cache_control, prompt_cache_options (mode implicit),
    prompt_cache_retention (in_memory: 5 minutes; 24h): the whole prompt is kept.
    prompt_cache_diagnostics: the answer explains in `diagnostics` why less was found in the cache
    than possible.
    """

    cache_control: CacheControl | None = None

    @property
    def cache_request(self) -> CacheRequest:
        """Read the cache settings. Raises InvalidRequest for an invalid lifetime."""
        return self.read(self.cache_control)


class ThinkingSwitch(Struct, forbid_unknown_fields=True):
    """Reasoning on or off before the answer, as Anthropic, Zhipu and more write it."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]
    """disabled turns reasoning off. All other values turn it on."""
    budget_tokens: Natural | None = None
    """Maximum reasoning tokens. After them, the answer proper begins."""
    clear_thinking: Literal[True] | None = None
    """Must be true. The chat template decides which earlier reasoning the model sees."""
    display: Literal["summarized"] | None = None
    """Accepted. The answer shows the full reasoning instead."""


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    """How much to reason, in OpenAI's and OpenRouter's words."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Natural | None = None
    """Maximum reasoning tokens. After them, the answer proper begins."""
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    """Accepted. The answer shows the full reasoning instead."""
    generate_summary: Literal["auto", "concise", "detailed", "none"] | None = None
    """Accepted. summary under its older name."""
    context: Literal["auto"] | None = None
    """Must be auto. The chat template decides which earlier reasoning the model sees."""
    mode: Literal["standard"] | None = None
    """Must be standard."""


class ChatReasoning(ReasoningConfig, forbid_unknown_fields=True):
    """The same for a chat."""

    exclude: bool | None = None
    """If true, the answer hides the reasoning."""


class ThinkingFields(Struct, kw_only=True):
    """How much to reason and to write, as the template understands these. A template without a word
    for a field ignores it, and the trace lists the field in `ignored`. Clients send any of these to
    every model.
    """

    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    reasoning: ChatReasoning | None = None

    @property
    def budget(self) -> int | None:
        """Return the maximum number of reasoning tokens, or None."""
        switch = self.thinking if isinstance(self.thinking, ThinkingSwitch) else None
        inner = None if self.reasoning is None else self.reasoning.max_tokens
        return inner if switch is None or switch.budget_tokens is None else switch.budget_tokens

    @property
    def effort(self) -> Effort | None:
        inner = None if self.reasoning is None else self.reasoning.effort
        return self.reasoning_effort or inner

    @property
    def thinks(self) -> bool | None:
        """Return True or False as requested, or None by default."""
        if isinstance(self.thinking, ThinkingSwitch):
            return self.thinking.type != "disabled"
        inner = None if self.reasoning is None else self.reasoning.enabled
        said = (self.enable_thinking, self.thinking, inner)
        return next((each for each in said if each is not None), None)


class ImageFields(Struct, kw_only=True):
    """Defaults for a request's images."""

    mm_processor_kwargs: ImageLimits | None = None

    def part_defaults(self, usual: ImageLimits | None = None) -> PartDefaults:
        """Return what parts without wishes of their own get. `usual`: limits by default."""
        return PartDefaults.of(self.mm_processor_kwargs or usual, None)


class PromptFields(ImageFields, kw_only=True):
    """How a chat's images and videos are read, and its template's variables."""

    media_io_kwargs: MediaReading | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def defaults(self, documents: DocumentOptions | None) -> PartDefaults:
        """Return what parts without wishes of their own get."""
        look, pace = self.mm_processor_kwargs, self.media_io_kwargs
        if look is None and pace is None and documents is None:
            return NO_DEFAULTS
        return PartDefaults.of(look, pace, documents)

    @property
    def variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}


class Conversation(PromptFields, kw_only=True):
    """What a chat consists of. A message is a `ChatMessage`."""

    messages: Annotated[list[msgspec.Raw], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    """If false, the prompt ends after the last message."""
    continue_final_message: bool | None = None
    """The answer continues the last message instead of starting a new one."""


class PredictedText(AnyFields):
    """A part in a predicted answer."""

    type: Literal["text"]
    text: str


class Prediction(AnyFields):
    """OpenAI's predicted output: text that the answer will largely repeat. It leaves the answer
    unchanged.
    """

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class LikeliestTokens(Protocol):
    """How many of the likeliest tokens an answer lists for each of its own."""

    @property
    def top_logprobs(self) -> int | None: ...


def count_likeliest(fields: LikeliestTokens, asked: bool, switch: str) -> int:
    """Return their number. Raises InvalidRequest unless the field `switch` has asked for any."""
    if fields.top_logprobs and not asked:
        raise InvalidRequest(f"top_logprobs needs {switch}", "top_logprobs")
    return fields.top_logprobs or 0


class ChatAnswer(Struct, kw_only=True):
    """What a chat's answer contains."""

    max_completion_tokens: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    """max_tokens under its newer name. With -1, only the context limits the answer."""
    logprobs: bool | None = None
    """Return the log-probability of each token in the answer."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include_reasoning: bool | None = None
    """If false, the answer hides the reasoning."""
    separate_reasoning: bool | None = None
    """If false, the text includes the reasoning as the model writes it."""
    prediction: Prediction | None = None
    """Text that the answer will mostly repeat. It saves time and keeps the answer the same."""


class ToolRules(Struct, kw_only=True):
    """How the model may use tools (`text/grammar/tools.py`)."""

    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def parallel(self) -> bool:
        """Return False if an answer may have one call alone."""
        return self.parallel_tool_calls is not False


class ToolUse(ToolRules, kw_only=True):
    """Tools, and how the model may use them."""

    tools: list[Any] | None = None


class Structure(Struct, kw_only=True):
    """The form that answers have: OpenAI's field, and vLLM's spellings, new and old. At most one of
    them is used.
    """

    response_format: dict[str, Any] | None = None
    """The answer's form: text, json_object, or json_schema and its schema."""
    structured_outputs: dict[str, Any] | None = None
    """The answer's form in vLLM's terms: json, regex, choice, grammar or json_object."""
    guided_json: Any = None
    """The answer is JSON that follows this schema."""
    guided_json_object: Any = None
    """If true, the answer is any JSON object."""
    guided_regex: Any = None
    """The answer matches this regular expression."""
    guided_choice: Any = None
    """The answer is one of these texts."""
    guided_grammar: Any = None
    """The answer follows this Lark grammar."""
    guided_whitespace_pattern: Any = None
    """A regular expression for white space within guided_json."""


class TextPrompt(Struct, kw_only=True):
    """Prompts, one or several, as text or as token ids, and their display in the answer."""

    prompt: str | list[str | Natural | list[Natural]]
    """One prompt or several, each as text or as token ids."""
    logprobs: Integer | None = None
    """Return each token's log-probability and list this many of the likeliest tokens."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    """The answer begins with the prompt."""


class Counting(Struct, kw_only=True):
    """What POST /tokenize shows beside the count."""

    add_special_tokens: bool | None = None
    """Add the tokens that the tokenizer puts around a text. Default: false for chats."""
    return_token_strs: bool = False
    """Return the text of each token, too."""


class Tokens(Struct, kw_only=True):
    """The token ids for POST /detokenize."""

    tokens: list[Natural]
    """Token ids to turn into text."""
    model: str | None = None


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest:
    """Body for POST /v1/chat/completions."""

    conversation: Conversation
    sampling: Sampling
    ending: Ending
    reply: Reply
    answer: ChatAnswer
    thinking: ThinkingFields | None
    restraint: Restraint | None
    caching: PromptCaching | None
    tool_use: ToolUse | None
    structure: Structure | None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Body for POST /v1/completions."""

    text: TextPrompt
    sampling: Sampling
    ending: Ending
    reply: Reply
    restraint: Restraint | None
    caching: PromptCaching | None
    structure: Structure | None


@dataclass(frozen=True, slots=True)
class TokenizeChatRequest:
    """Body for POST /tokenize with a chat."""

    request: ChatCompletionRequest
    counting: Counting


@dataclass(frozen=True, slots=True)
class TokenizeTextRequest:
    """Body for POST /tokenize with a text."""

    request: CompletionRequest
    counting: Counting


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Body for POST /detokenize."""

    tokens: Tokens


_MAX_BYTES = dict.fromkeys(Structure.__struct_fields__, 1 << 20)
"""A schema with all its white space; without, its own limit is an eighth."""

CHAT = BodySchema(ChatCompletionRequest, {"add_special_tokens": (False,)}, most_bytes=_MAX_BYTES)
COMPLETION = BodySchema(CompletionRequest, {"add_special_tokens": (True,)}, most_bytes=_MAX_BYTES)
TOKENIZE_CHAT = BodySchema(TokenizeChatRequest)
TOKENIZE_TEXT = BodySchema(TokenizeTextRequest)
DETOKENIZE = BodySchema(DetokenizeRequest, {"skip_special_tokens": (False,)})
