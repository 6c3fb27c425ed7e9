"""The body of POST /v1/responses: fields, checks and errors.

Fields are grouped by topic. `items.py` has the items of `input`, and `read.py` converts both to
requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.api.body_schema import BodySchema
from saccade.api.chat.fields import (
    CachedCaching,
    Effort,
    Obfuscation,
    PromptFields,
    ReasoningConfig,
    RequestScope,
    SaccadeOptions,
    Sampling,
    Stops,
    ToolRules,
    Verbosity,
)
from saccade.api.restraint import Restraint
from saccade.api.stored_objects import Metadata
from saccade.core.types import MAX_LOGPROBS
from saccade.front.fields import Positive
from saccade.plugins.responses.items import Id

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
"""The accepted values of `include`. Only logprobs has an effect: image URLs are always included,
reasoning is not encrypted, and the rest belongs to tools that this server does not run."""

Name = Annotated[str, Meta(max_length=512)]


class TextFormat(Struct, forbid_unknown_fields=True):
    """The answer's format."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """text: any text. json_object: any JSON object. json_schema: JSON that follows a schema."""
    name: str | None = None
    """A name for the schema."""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseText(Struct, forbid_unknown_fields=True):
    """The answer's format and length. verbosity: a hint for the chat template."""

    format: TextFormat | None = None
    """The answer's format: text, any JSON, or JSON that follows a schema."""
    verbosity: Verbosity | None = None


class ResponseInput(Struct, kw_only=True):
    """The input. Items are messages, calls of functions, their outputs, and reasoning."""

    input: str | list[msgspec.Raw]
    """A text, or the items of a conversation, the oldest first."""
    instructions: str | None = None
    """A system prompt, which precedes the input."""
    previous_response_id: Id | None = None
    """A stored response that the input continues."""
    truncation: Literal["auto", "disabled"] | None = None


class ResponseEnding(Stops, kw_only=True):
    """When the answer ends."""

    max_output_tokens: Positive | None = None
    """Maximum tokens of the answer."""


class ResponseForm(ToolRules, kw_only=True):
    """What the answer contains.

    reasoning_effort: the name that `reasoning.effort` has in chats. Programs that convert chats to
    responses send it.
    """

    text: ResponseText | None = None
    """The answer's form and length."""
    tools: list[dict[str, Any]] | None = None
    max_tool_calls: Positive | None = None
    """Accepted and echoed. It limits server-side tools, of which this server has none."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    """What to add to the answer. Of the accepted values, only logprobs has an effect."""
    reasoning: ReasoningConfig | None = None
    reasoning_effort: Effort | None = None

    @property
    def effort(self) -> Effort | None:
        inner = None if self.reasoning is None else self.reasoning.effort
        return inner or self.reasoning_effort


class ResponseDelivery(Struct, kw_only=True):
    """How the answer is sent and stored, and information about the client."""

    stream: bool | None = None
    stream_options: Obfuscation | None = None
    store: bool | None = None
    """If false, the response is not stored. By default, the server keeps it in memory for
    previous_response_id.
    """
    metadata: Metadata | None = None
    user: Name | None = None
    """The end user. The server ignores it."""
    safety_identifier: Name | None = None
    """The end user. The server ignores it."""
    saccade: SaccadeOptions | None = None

    @property
    def trace(self) -> bool:
        return self.saccade is not None and self.saccade.trace


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """Body for POST /v1/responses."""

    asked: ResponseInput
    prompt: PromptFields
    scope: RequestScope
    caching: CachedCaching
    sampling: Sampling
    ending: ResponseEnding
    restraint: Restraint | None
    form: ResponseForm
    delivery: ResponseDelivery


RESPONSES: BodySchema[ResponsesRequest] = BodySchema(ResponsesRequest)
