"""The request bodies of OpenAI's API: their fields, in groups.

An unknown or unsupported field leads to a 400 that names it. A field that would change the answer
is never ignored. `body_schema.py` parses the bodies, and `read.py` converts them to requests. The
schemas of messages are in `front/content.py`.
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
"""A value of `max_tokens` for no limit. Clients of llama.cpp and LM Studio send it."""
MAX_CHOICES = 128
"""Maximum number of answers to one request: the number of prompts times `n`."""

MAX_SALT = 256
"""Maximum length of `cache_salt`, in characters."""

MAX_CACHE_KEY = 1024
"""Maximum length of `prompt_cache_key`, in characters."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Obfuscation(Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class StreamOptions(Obfuscation, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    """The stream ends with a chunk that reports usage."""
    continuous_usage_stats: bool = False
    """With include_usage, every chunk reports usage so far."""


class SaccadeOptions(DocumentOptions, forbid_unknown_fields=True):
    """Fields that only this server has."""

    trace: bool = False
    """Report the cache in which each image was found, the reasons for misses in faster caches, and
    the cost.
    """


class Sampling(Struct, kw_only=True):
    """How tokens are sampled.

    Missing fields have the defaults of the checkpoint's generation_config.json, or else OpenAI's.
    `Sampling` and `Ending` declare only types. `SamplingParams` checks the bounds.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    """Sample only from this many of the likeliest tokens. 0 and -1 remove the limit."""
    min_p: float | None = None
    """Minimum probability of a token, relative to the likeliest token."""
    repetition_penalty: float | None = None
    """Values above 1 make tokens of the prompt and the answer less likely."""
    presence_penalty: float | None = None
    """Subtracted from the logit of each token already in the answer."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit for each time it is in the answer."""
    seed: Integer | None = None
    """Seed of the sampling. The same seed and request give the same answer."""
    logit_bias: dict[Integer, float] | None = None


class Stops(Struct, kw_only=True):
    """What ends an answer, apart from its maximum length."""

    min_tokens: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None


class Ending(Stops, kw_only=True):
    """What ends an answer."""

    max_tokens: Integer | None = None
    """Maximum tokens of an answer. With -1, only the context limits it. With 0, the server computes
    and caches the prompt without an answer.
    """


class RequestScope(Struct, kw_only=True):
    """The model, and a salt that separates the caches of different users."""

    model: str | None = None  # None: the server's own
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None

    @property
    def salt(self) -> str:
        return self.cache_salt or ""


class Reply(RequestScope, kw_only=True):
    """The model, the number of answers, and how they are sent."""

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
    """The fields that `check_stream` reads. A protocol, because a Struct can have only one base
    class with fields.
    """

    @property
    def stream(self) -> bool | None: ...
    @property
    def stream_options(self) -> Obfuscation | None: ...


def check_stream(fields: Streamed) -> None:
    """Raise InvalidRequest for stream options without `stream`, and for unsupported stream
    options.
    """
    if fields.stream_options is None:
        return
    if not fields.stream:
        message = "stream_options is only allowed together with stream=true"
        raise InvalidRequest(message, "stream_options")
    if fields.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")


class NamedCaching(Struct, kw_only=True):
    """Cache settings for the whole prompt that all OpenAI endpoints have."""

    prompt_cache_key: Annotated[str, Meta(max_length=MAX_CACHE_KEY)] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def cache_request(self) -> CacheRequest:
        """The cache settings for the whole prompt. Raises InvalidRequest if a lifetime is
        invalid.
        """
        return read_cache_request(
            None, self.prompt_cache_options, None, False, self.prompt_cache_key or ""
        )


class CachedCaching(NamedCaching, kw_only=True):
    """Cache settings of endpoints that generate answers, with retention and diagnostics."""

    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_diagnostics: bool | dict[str, Any] | None = None

    @property
    def cache_request(self) -> CacheRequest:
        """The cache settings for the whole prompt. Raises InvalidRequest if a lifetime is
        invalid.
        """
        return self.read(None)

    @property
    def compared(self) -> str | None:
        """The id of the response with which diagnostics compare, or None."""
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
    """Cache settings for the whole prompt. `front/breakpoints.py` reads the breakpoints on parts,
    messages and tools.

    The whole prompt is kept with `cache_control`, `prompt_cache_options` (mode implicit) or
    `prompt_cache_retention` (in_memory: 5 minutes; 24h). `prompt_cache_key` names prompts with a
    common prefix. It selects the earlier prompts that diagnostics compare. It does not affect who
    shares cache entries, which depends on `cache_salt` and the API key. With
    `prompt_cache_diagnostics`, the answer explains in `diagnostics` why the cache held less than it
    could.
    """

    cache_control: CacheControl | None = None

    @property
    def cache_request(self) -> CacheRequest:
        """The cache settings for the whole prompt. Raises InvalidRequest if a lifetime is
        invalid.
        """
        return self.read(self.cache_control)


class ThinkingSwitch(Struct, forbid_unknown_fields=True):
    """Whether to reason before the answer, in the format of Anthropic, Zhipu and others."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]
    """disabled turns reasoning off. All other values turn it on."""
    budget_tokens: Natural | None = None
    """Maximum reasoning tokens. After them, the answer starts."""
    clear_thinking: Literal[True] | None = None
    """Must be true. The chat template decides which earlier reasoning the model sees."""
    display: Literal["summarized"] | None = None
    """Accepted. The answer shows the full reasoning instead."""


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    """How much to reason, in the format of OpenAI and OpenRouter."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Natural | None = None
    """Maximum reasoning tokens. After them, the answer starts."""
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    """Accepted. The answer shows the full reasoning instead."""
    generate_summary: Literal["auto", "concise", "detailed", "none"] | None = None
    """Accepted. summary under its older name."""
    context: Literal["auto"] | None = None
    """Must be auto. The chat template decides which earlier reasoning the model sees."""
    mode: Literal["standard"] | None = None
    """Must be standard."""


class ChatReasoning(ReasoningConfig, forbid_unknown_fields=True):
    """How much to reason in a chat."""

    exclude: bool | None = None
    """If true, the answer hides the reasoning."""


class ThinkingFields(Struct, kw_only=True):
    """How much to reason and to write. The chat template interprets these fields.

    A template ignores fields that it does not use, and the trace lists these in `ignored`, because
    clients send them to every model.
    """

    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    reasoning: ChatReasoning | None = None

    @property
    def budget(self) -> int | None:
        """The maximum number of reasoning tokens, or None if the request sets none."""
        switch = self.thinking if isinstance(self.thinking, ThinkingSwitch) else None
        inner = None if self.reasoning is None else self.reasoning.max_tokens
        return inner if switch is None or switch.budget_tokens is None else switch.budget_tokens

    @property
    def effort(self) -> Effort | None:
        inner = None if self.reasoning is None else self.reasoning.effort
        return self.reasoning_effort or inner

    @property
    def thinks(self) -> bool | None:
        """Whether the model should reason, or None if the request does not say."""
        if isinstance(self.thinking, ThinkingSwitch):
            return self.thinking.type != "disabled"
        inner = None if self.reasoning is None else self.reasoning.enabled
        said = (self.enable_thinking, self.thinking, inner)
        return next((each for each in said if each is not None), None)


class ImageFields(Struct, kw_only=True):
    """Defaults for a request's images."""

    mm_processor_kwargs: ImageLimits | None = None

    def part_defaults(self, usual: ImageLimits | None = None) -> PartDefaults:
        """Return the defaults of images. `usual` is used if the request sets no limits."""
        return PartDefaults.of(self.mm_processor_kwargs or usual, None)


class PromptFields(ImageFields, kw_only=True):
    """How a chat's images and videos are read, and variables for its template."""

    media_io_kwargs: MediaReading | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def defaults(self, documents: DocumentOptions | None) -> PartDefaults:
        """Return the defaults of images, videos and documents."""
        look, pace = self.mm_processor_kwargs, self.media_io_kwargs
        if look is None and pace is None and documents is None:
            return NO_DEFAULTS
        return PartDefaults.of(look, pace, documents)

    @property
    def variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}


class Conversation(PromptFields, kw_only=True):
    """The content of a chat. Messages are `ChatMessage`s."""

    messages: Annotated[list[msgspec.Raw], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    """If false, the prompt ends after the last message."""
    continue_final_message: bool | None = None
    """The answer continues the last message instead of starting a new one."""


class PredictedText(AnyFields):
    """A part of a predicted answer."""

    type: Literal["text"]
    text: str


class Prediction(AnyFields):
    """OpenAI's predicted output: text that the answer will mostly repeat.

    It speeds up the answer, and does not change it.
    """

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class LikeliestTokens(Protocol):
    """The field with the number of likeliest tokens to return for each token of the answer."""

    @property
    def top_logprobs(self) -> int | None: ...


def count_likeliest(fields: LikeliestTokens, asked: bool, switch: str) -> int:
    """Return the number of likeliest tokens to return for each token of the answer.

    asked: True if the request sets the field `switch`, which enables log-probabilities.

    Raises InvalidRequest if the request sets `top_logprobs` without the field `switch`.
    """
    if fields.top_logprobs and not asked:
        raise InvalidRequest(
            f"top_logprobs requires {switch}: set it, or omit top_logprobs", "top_logprobs"
        )
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
        """False if an answer may contain at most one tool call."""
        return self.parallel_tool_calls is not False


class ToolUse(ToolRules, kw_only=True):
    """Tools, and how the model may use them."""

    tools: list[Any] | None = None


class Structure(Struct, kw_only=True):
    """The format that answers must have, specified in one of these fields.

    `response_format` is OpenAI's. `structured_outputs` is vLLM's, and `guided_*` are its former
    names.
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
    """One or several prompts, as text or as token ids, and whether the answer shows them."""

    prompt: str | list[str | Natural | list[Natural]]
    """One prompt or several, each as text or as token ids."""
    logprobs: Integer | None = None
    """Return each token's log-probability and list this many of the likeliest tokens."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    """The answer begins with the prompt."""


class Counting(Struct, kw_only=True):
    """What POST /tokenize returns in addition to the count."""

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
    """The body of POST /v1/chat/completions."""

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
    """The body of POST /v1/completions."""

    text: TextPrompt
    sampling: Sampling
    ending: Ending
    reply: Reply
    restraint: Restraint | None
    caching: PromptCaching | None
    structure: Structure | None


@dataclass(frozen=True, slots=True)
class TokenizeChatRequest:
    """The body of POST /tokenize with a chat."""

    request: ChatCompletionRequest
    counting: Counting


@dataclass(frozen=True, slots=True)
class TokenizeTextRequest:
    """The body of POST /tokenize with a text."""

    request: CompletionRequest
    counting: Counting


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """The body of POST /detokenize."""

    tokens: Tokens


_MAX_BYTES = dict.fromkeys(Structure.__struct_fields__, 1 << 20)
"""Maximum size of a schema's JSON, with its white space, in bytes. Without white space, the limit
is an eighth of this.
"""

CHAT = BodySchema(ChatCompletionRequest, {"add_special_tokens": (False,)}, most_bytes=_MAX_BYTES)
COMPLETION = BodySchema(CompletionRequest, {"add_special_tokens": (True,)}, most_bytes=_MAX_BYTES)
TOKENIZE_CHAT = BodySchema(TokenizeChatRequest)
TOKENIZE_TEXT = BodySchema(TokenizeTextRequest)
DETOKENIZE = BodySchema(DetokenizeRequest, {"skip_special_tokens": (False,)})
