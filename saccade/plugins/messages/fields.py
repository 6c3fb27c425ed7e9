"""Anthropic's request bodies (POST /v1/messages): the schemas.

Owns the accepted fields. `front/unread_fields.py` has the names that are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.api.body_schema import BodySchema
from saccade.core.errors import InvalidRequest
from saccade.front.breakpoints import CacheControl
from saccade.front.content import Name
from saccade.front.fields import FrameCount, Positive
from saccade.front.image_parts import Corners, DigestName
from saccade.front.part_defaults import DocumentOptions, PageNumber
from saccade.front.unread_fields import AnyFields, Citations, IgnoredFields, UnsupportedFields
from saccade.front.video_parts import Rate
from saccade.plugins.agents.history_edits import ClearToolUses
from saccade.plugins.messages.toolsets import BrowserState


class MarkedBlock(UnsupportedFields, kw_only=True):
    """A block of text or of tools that may carry a mark."""

    cache_control: CacheControl | None = None


class MediaBlock(IgnoredFields, kw_only=True):
    """A block with an image, a video or a document, that may carry a mark."""

    cache_control: CacheControl | None = None


class TextBlock(MarkedBlock, tag_field="type", tag="text", kw_only=True):
    """Text."""

    text: str


class Base64Source(IgnoredFields, tag_field="type", tag="base64", kw_only=True):
    """An image's bytes."""

    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class URLSource(IgnoredFields, tag_field="type", tag="url", kw_only=True):
    """An image's address."""

    url: str


class FileSource(IgnoredFields, tag_field="type", tag="file", kw_only=True):
    """An image that was uploaded."""

    file_id: str


class DigestSource(IgnoredFields, tag_field="type", tag="digest", kw_only=True):
    """An image that was sent before: our extension."""

    digest: DigestName


class Transformations(Struct, forbid_unknown_fields=True):
    """How to treat an image that is too large."""

    oversized_image: Literal["downsize", "error"] | None = None
    """downsize, the default: the model sees a smaller image. error: the server refuses the request,
    and names the largest size that fits.
    """


class ImageBlock(MediaBlock, tag_field="type", tag="image", kw_only=True):
    """An image. min_pixels, max_pixels, region: our extension, as in a chat's parts."""

    source: Base64Source | URLSource | FileSource | DigestSource
    transformations: Transformations | None = None
    """How the server treats an image that is too large."""
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    region: Corners | None = None


class VideoBytes(IgnoredFields, tag_field="type", tag="base64", kw_only=True):
    """A video's bytes."""

    data: str
    media_type: Annotated[str, Meta(pattern="^video/")] = "video/mp4"


class FramesSource(IgnoredFields, tag_field="type", tag="frames", kw_only=True):
    """Frames that the client has taken, in their order: their URLs, or uploaded files."""

    frames: list[Any]
    """The frames, in order."""


class VideoBlock(MediaBlock, tag_field="type", tag="video", kw_only=True):
    """A video: our extension, with the fields that a chat's `video_url` has."""

    source: VideoBytes | URLSource | FileSource | FramesSource
    fps: Rate | None = None
    num_frames: FrameCount | None = None
    max_frames: Positive | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    total_pixels: Positive | None = None


class PlainSource(IgnoredFields, tag_field="type", tag="text", kw_only=True):
    """A document's text."""

    data: str
    """The text."""
    media_type: Literal["text/plain"]


class PDFBytes(IgnoredFields, tag_field="type", tag="base64", kw_only=True):
    """A PDF's bytes."""

    data: str
    media_type: Literal["application/pdf"] = "application/pdf"


class PartsSource(IgnoredFields, tag_field="type", tag="content", kw_only=True):
    """A document that consists of texts and images."""

    content: str | list[TextBlock | ImageBlock]
    """A text, or texts and images."""


class DocumentBlock(MediaBlock, tag_field="type", tag="document", kw_only=True):
    """A document: a PDF, a text, or texts and images. min_pixels, max_pixels, page, region: our
    extension, as in a chat's parts.
    """

    source: PlainSource | PartsSource | PDFBytes | URLSource | FileSource | DigestSource
    title: str | None = None
    """A title, placed before the document's text."""
    context: str | None = None
    """Context for the document, placed before its text."""
    citations: Citations | None = None
    """Must be disabled, because answers never cite their sources."""
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    page: PageNumber | None = None
    region: Corners | None = None


class ThinkingBlock(UnsupportedFields, tag_field="type", tag="thinking"):
    """Reasoning from an earlier answer."""

    thinking: str
    """The model's reasoning."""
    signature: str = ""
    """Another server's proof. This server ignores it."""


class RedactedBlock(UnsupportedFields, tag_field="type", tag="redacted_thinking"):
    """Reasoning readable by its maker alone: accepted, and left out."""

    data: str
    """Data that only its maker can read. The prompt leaves it out."""


class ToolUseBlock(MarkedBlock, tag_field="type", tag="tool_use", kw_only=True):
    """A call from an earlier answer."""

    id: Name
    name: Name
    input: dict[str, Any]
    """The tool's arguments."""
    toolset_name: str | None = None
    """The toolset of the call, if it belongs to one."""


class ToolResultBlock(MarkedBlock, tag_field="type", tag="tool_result", kw_only=True):
    """A tool's result: text, images, or both."""

    tool_use_id: Name
    """The call that this block answers."""
    content: (
        str | list[TextBlock | ImageBlock | VideoBlock | DocumentBlock | BrowserState] | None
    ) = None
    """The tool's answer: a text, or texts and images."""
    is_error: bool | None = None
    """The tool failed. The model reads this before the content."""


Shown = TextBlock | ImageBlock | VideoBlock | DocumentBlock
Block = Shown | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class InputMessage(UnsupportedFields):
    """A message in the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool run by the client."""

    name: str
    input_schema: dict[str, Any]
    """The JSON schema for the tool's input."""
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Accepted and ignored."""
    input_examples: list[Any] | None = None
    """Accepted and hidden from the model."""
    allowed_callers: list[Literal["direct"]] | None = None
    """Must be direct. The model itself calls the tool."""
    cache_control: CacheControl | None = None
    defer_loading: Literal[False] | None = None
    """Must be false. The model sees every tool."""


class ToolKind(Struct):
    """A tool by its type. Tools without a schema are Anthropic's own."""

    type: str | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    """How to use tools: optional, required, forbidden, or a named tool."""

    type: Literal["auto", "any", "tool", "none"]
    """auto: may call. any: must call one. tool: must call this one. none: may not call."""
    name: str | None = None
    """The tool that the model must call. Only type tool takes it."""
    disable_parallel_tool_use: bool = False
    """If true, an answer has at most one call."""


class Thinking(Struct, forbid_unknown_fields=True):
    """Reasoning before the answer: on or off."""

    type: Literal["enabled", "adaptive", "disabled"]
    """disabled turns reasoning off. All other values turn it on."""
    budget_tokens: Positive | None = None
    """Maximum reasoning tokens. After them, the answer proper begins."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the answer signs its reasoning and hides it."""


class OutputFormat(Struct, forbid_unknown_fields=True):
    """The answer's form."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The answer's form."""

    format: OutputFormat | None = None
    """The answer's form: JSON with a schema."""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Accepted and ignored."""


class Metadata(AnyFields):
    """The user."""

    user_id: str | None = None
    """The end user. The server ignores it."""


class Diagnostics(Struct, forbid_unknown_fields=True):
    """Asks why the cache missed what the message before contained."""

    previous_message_id: str | None = None
    """Accepted. The server compares the most similar earlier prompt."""


class ClearThinking(
    Struct, tag_field="type", tag="clear_thinking_20251015", forbid_unknown_fields=True
):
    """Leaves old reasoning out. Templates do so according to their model."""

    keep: Any = None
    """Accepted and ignored. The chat template decides which reasoning stays."""


class InputTokens(
    Struct, tag_field="type", tag="input_tokens", forbid_unknown_fields=True, frozen=True
):
    """So many tokens of the prompt."""

    value: Annotated[int, Meta(ge=0)]


class ToolUses(Struct, tag_field="type", tag="tool_uses", forbid_unknown_fields=True, frozen=True):
    """So many tool uses."""

    value: Annotated[int, Meta(ge=0)]


class ClearToolUsesEdit(
    Struct, tag_field="type", tag="clear_tool_uses_20250919", forbid_unknown_fields=True
):
    """Replaces old tool results by a short text. trigger: beyond which it begins. keep: the newest
    uses that stay. clear_at_least: fewer are not worth it. exclude_tools: whose results stay.
    clear_tool_inputs: also the calls' arguments, of all tools or of these.
    """

    trigger: InputTokens | ToolUses = InputTokens(100_000)
    keep: ToolUses = ToolUses(3)
    clear_at_least: InputTokens | None = None
    exclude_tools: list[Name] | None = None
    clear_tool_inputs: bool | list[Name] | None = None

    def edit(self) -> ClearToolUses:
        """Return the edit in the front's terms."""
        trigger, inputs = self.trigger, self.clear_tool_inputs
        by_tokens = isinstance(trigger, InputTokens)
        return ClearToolUses(
            trigger.value if by_tokens else None,
            None if by_tokens else trigger.value,
            self.keep.value,
            0 if self.clear_at_least is None else self.clear_at_least.value,
            frozenset(self.exclude_tools or ()),
            frozenset(inputs) if isinstance(inputs, list) else bool(inputs),
        )


class ContextManagement(Struct, forbid_unknown_fields=True):
    """Ways to shorten the conversation."""

    edits: list[ClearThinking | ClearToolUsesEdit] | None = None
    """Ways to shorten the conversation."""

    def edit(self) -> ClearToolUses | None:
        """Return the edit of tool uses, if asked for. Raises InvalidRequest for two."""
        found = [each for each in self.edits or () if isinstance(each, ClearToolUsesEdit)]
        if len(found) > 1:
            where = "context_management.edits"
            raise InvalidRequest(f"{where}: clear_tool_uses_20250919 may occur once", where)
        return found[0].edit() if found else None


class Inquiry(Struct, kw_only=True):
    """The model, messages and tools. A message is an `InputMessage`, a tool a `ToolDefinition`."""

    model: str
    messages: Annotated[list[msgspec.Raw], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    """The system prompt."""
    tools: list[msgspec.Raw] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    """The answer's form."""
    output_format: OutputFormat | None = None
    """The answer's form. output_config under its older name."""
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    """How to shorten the conversation."""
    thread: dict[str, Any] | None = None
    """Refused. Send all messages, because the server keeps no conversation."""
    saccade: DocumentOptions | None = None


class Drawing(Struct, kw_only=True):
    """Sampling, and where the answer ends. max_tokens 0: only compute the prompt."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Maximum tokens of the answer. With 0, the server computes and caches the prompt without an
    answer.
    """
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Sample only from this many of the likeliest tokens. 0 removes the limit."""
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None


class Sender(Struct, kw_only=True):
    """The client, and its terms. These fields leave the answer unchanged."""

    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Diagnostics | None = None
    """Ask why the cache held less of the prompt than it could."""


@dataclass(frozen=True, slots=True)
class CountTokensRequest:
    """Body for POST /v1/messages/count_tokens."""

    inquiry: Inquiry


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """Body for POST /v1/messages."""

    inquiry: Inquiry
    drawing: Drawing
    sender: Sender


COUNT_TOKENS = BodySchema(
    CountTokensRequest, ignored=Drawing.__struct_fields__ + Sender.__struct_fields__
)
MESSAGES = BodySchema(MessagesRequest)
