"""The body of POST /v1/responses: fields, checks and refusals.

Owns the fields, by topic. `items.py` has the items of `input`, `read.py` makes requests of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.api.body_schema import BodySchema
from saccade.api.chat.fields import LONGEST_SALT, Effort, SaccadeOptions, Sampling, Verbosity
from saccade.api.responses.items import Id
from saccade.api.restraint import Restraint
from saccade.core.types import MAX_LOGPROBS
from saccade.front.breakpoints import PromptCacheOptions
from saccade.front.fields import Integer, Positive
from saccade.front.part_defaults import ImageLimits
from saccade.front.video_parts import MediaReading

MOST_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
)
"""What `include` may name. Only logprobs change anything: images are always told, reasoning is not
encrypted, and the rest belongs to tools that are refused."""

Name = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MOST_METADATA),
]


class TextFormat(Struct, forbid_unknown_fields=True):
    """The answer's form."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """text: any text. json_object: any JSON object. json_schema: JSON that follows a schema."""
    name: str | None = None
    """A name for the schema."""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseText(Struct, forbid_unknown_fields=True):
    """The answer's form and length. verbosity: a hint to the template."""

    format: TextFormat | None = None
    """The answer's form: text, any JSON, or JSON with a schema."""
    verbosity: Verbosity | None = None


class ReasoningConfig(Struct):
    """How much to reason. effort: a hint to the template; "none" switches reasoning off. Reasoning
    is shown as it is, without a summary.
    """

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted. The answer shows the full reasoning instead."""


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """How to stream."""

    include_obfuscation: bool | None = None


class ResponseInput(Struct, kw_only=True):
    """The input. An item in `input` is a message, a function's call or output, or reasoning."""

    input: str | list[msgspec.Raw]
    """A text, or the items of a conversation, oldest first."""
    instructions: str | None = None
    """A system prompt, placed before the input."""
    previous_response_id: Id | None = None
    """A stored response that the input continues."""
    cache_salt: Annotated[str, Meta(max_length=LONGEST_SALT)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ImageLimits | None = None
    media_io_kwargs: MediaReading | None = None


class ResponseEnding(Struct, kw_only=True):
    """When the answer ends."""

    max_output_tokens: Positive | None = None
    """Maximum tokens of the answer."""
    min_tokens: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None


class ResponseForm(Struct, kw_only=True):
    """What the answer contains. reasoning_effort: `reasoning.effort` by its name in chats, as
    programs send it that turn their chats into responses.
    """

    text: ResponseText | None = None
    """The answer's form and length."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None
    """Accepted and returned. It limits tools that a server runs, and this server runs none."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    """What to add to the answer. Among the accepted names, only logprobs adds anything."""
    reasoning: ReasoningConfig | None = None
    reasoning_effort: Effort | None = None

    @property
    def effort(self) -> Effort | None:
        inner = None if self.reasoning is None else self.reasoning.effort
        return inner or self.reasoning_effort


class ResponseDelivery(Struct, kw_only=True):
    """How the answer is sent and kept, and facts about the client."""

    model: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    """If false, the server discards the response. By default it keeps responses in memory for
    previous_response_id.
    """
    metadata: Metadata | None = None
    user: Name | None = None
    """The end user. The server ignores it."""
    safety_identifier: Name | None = None
    """The end user. The server ignores it."""
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_diagnostics: bool | dict[str, Any] | None = None
    saccade: SaccadeOptions | None = None

    @property
    def compared(self) -> str | None:
        """Return the response to compare with for cache diagnostics."""
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id

    @property
    def trace(self) -> bool:
        return self.saccade is not None and self.saccade.trace


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """Body for POST /v1/responses."""

    asked: ResponseInput
    sampling: Sampling
    ending: ResponseEnding
    restraint: Restraint | None
    form: ResponseForm
    delivery: ResponseDelivery


RESPONSES: BodySchema[ResponsesRequest] = BodySchema(ResponsesRequest)
