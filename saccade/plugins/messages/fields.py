"""The schemas of Anthropic's request bodies (POST /v1/messages).

`front/unread_fields.py` lists fields that are ignored.
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
    """Base of text and tool blocks, which may have a cache breakpoint."""

    cache_control: CacheControl | None = None


class MediaBlock(IgnoredFields, kw_only=True):
    """Base of image, video and document blocks, which may have a cache breakpoint."""

    cache_control: CacheControl | None = None


class TextBlock(MarkedBlock, tag_field="type", tag="text", kw_only=True):
    """Text."""

    text: str


class Base64Source(IgnoredFields, tag_field="type", tag="base64", kw_only=True):
    """An image's bytes."""

    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class URLSource(IgnoredFields, tag_field="type", tag="url", kw_only=True):
    """The URL of an image."""

    url: str


class FileSource(IgnoredFields, tag_field="type", tag="file", kw_only=True):
    """An image that was uploaded."""

    file_id: str


class DigestSource(IgnoredFields, tag_field="type", tag="digest", kw_only=True):
    """An image that was sent before. Saccade's extension."""

    digest: DigestName


class Transformations(Struct, forbid_unknown_fields=True):
    """How to treat an image that is too large."""

    oversized_image: Literal["downsize", "error"] | None = None
    """downsize, the default: the model gets a smaller image. error: the server rejects the request
    with the largest size that fits.
    """


class ImageBlock(MediaBlock, tag_field="type", tag="image", kw_only=True):
    """An image. min_pixels, max_pixels, region: Saccade's extensions, as in a chat's parts."""

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
    """Frames that the client has sampled: their URLs, or uploaded files."""

    frames: list[Any]
    """The frames, in order."""


class VideoBlock(MediaBlock, tag_field="type", tag="video", kw_only=True):
    """A video, with the fields of a chat's `video_url`. Saccade's extension."""

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
    """A document that consists of text and images."""

    content: str | list[TextBlock | ImageBlock]
    """A string, or blocks with text and images."""


class DocumentBlock(MediaBlock, tag_field="type", tag="document", kw_only=True):
    """A document: a PDF, a text, or texts and images. min_pixels, max_pixels, page, region:
    Saccade's extensions, as in a chat's parts.
    """

    source: PlainSource | PartsSource | PDFBytes | URLSource | FileSource | DigestSource
    title: str | None = None
    """A title, which precedes the document's text."""
    context: str | None = None
    """Context for the document, which precedes its text."""
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
    """The signature of another server. This server ignores it."""


class RedactedBlock(UnsupportedFields, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only its author can read. It is accepted, but ignored."""

    data: str
    """Data that only its author can read. It is not part of the prompt."""


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
    """The call that this is the result of."""
    content: (
        str | list[TextBlock | ImageBlock | VideoBlock | DocumentBlock | BrowserState] | None
    ) = None
    """The tool's output: a string, or blocks with text and images."""
    is_error: bool | None = None
    """Whether the tool failed. If so, the model reads "Error:" before the content."""


Shown = TextBlock | ImageBlock | VideoBlock | DocumentBlock
Block = Shown | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class InputMessage(UnsupportedFields):
    """A message in the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    """The JSON schema for the tool's input."""
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Accepted and ignored."""
    input_examples: list[Any] | None = None
    """Accepted, but not shown to the model."""
    allowed_callers: list[Literal["direct"]] | None = None
    """Must be direct: the model calls the tool itself."""
    cache_control: CacheControl | None = None
    defer_loading: Literal[False] | None = None
    """Must be false: the model always sees all tools."""


class ToolKind(Struct):
    """The type of a tool. Types other than custom are Anthropic's own tools."""

    type: str | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    """Whether tools are optional, required, forbidden, or a single one is required."""

    type: Literal["auto", "any", "tool", "none"]
    """auto: may call. any: must call one. tool: must call this one. none: may not call."""
    name: str | None = None
    """The tool that the model must call. Only for type tool."""
    disable_parallel_tool_use: bool = False
    """If true, an answer has at most one call."""


class Thinking(Struct, forbid_unknown_fields=True):
    """Reasoning before the answer: on or off."""

    type: Literal["enabled", "adaptive", "disabled"]
    """disabled turns reasoning off. All other values turn it on."""
    budget_tokens: Positive | None = None
    """Maximum reasoning tokens. After them, the answer starts."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the answer has a signature instead of the reasoning."""


class OutputFormat(Struct, forbid_unknown_fields=True):
    """The answer's format."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The answer's format."""

    format: OutputFormat | None = None
    """The answer's format: JSON that follows a schema."""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Accepted and ignored."""


class Metadata(AnyFields):
    """The user."""

    user_id: str | None = None
    """The end user. The server ignores it."""


class Diagnostics(Struct, forbid_unknown_fields=True):
    """Requests the reason why tokens of the previous message were not cached."""

    previous_message_id: str | None = None
    """Accepted. The server compares with the most similar earlier prompt."""


class ClearThinking(
    Struct, tag_field="type", tag="clear_thinking_20251015", forbid_unknown_fields=True
):
    """Removes old reasoning. Chat templates already do so, as their model requires."""

    keep: Any = None
    """Accepted and ignored. The chat template decides which reasoning remains."""


class InputTokens(
    Struct, tag_field="type", tag="input_tokens", forbid_unknown_fields=True, frozen=True
):
    """A number of prompt tokens."""

    value: Annotated[int, Meta(ge=0)]


class ToolUses(Struct, tag_field="type", tag="tool_uses", forbid_unknown_fields=True, frozen=True):
    """A number of tool uses."""

    value: Annotated[int, Meta(ge=0)]


class ClearToolUsesEdit(
    Struct, tag_field="type", tag="clear_tool_uses_20250919", forbid_unknown_fields=True
):
    """Replaces old tool results with a short text. trigger: the size above which this happens.
    keep: how many of the latest uses remain. clear_at_least: do nothing if fewer tokens would be
    removed. exclude_tools: tools whose results remain. clear_tool_inputs: also remove the arguments
    of calls, to all tools or to these.
    """

    trigger: InputTokens | ToolUses = InputTokens(100_000)
    keep: ToolUses = ToolUses(3)
    clear_at_least: InputTokens | None = None
    exclude_tools: list[Name] | None = None
    clear_tool_inputs: bool | list[Name] | None = None

    def edit(self) -> ClearToolUses:
        """Convert to the edit that the front end applies."""
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
    """Edits that shorten the conversation."""

    edits: list[ClearThinking | ClearToolUsesEdit] | None = None
    """Edits that shorten the conversation."""

    def edit(self) -> ClearToolUses | None:
        """Return the edit of tool uses, if there is one. Raises InvalidRequest for two."""
        found = [each for each in self.edits or () if isinstance(each, ClearToolUsesEdit)]
        if len(found) > 1:
            where = "context_management.edits"
            raise InvalidRequest(f"{where}: clear_tool_uses_20250919 may occur only once", where)
        return found[0].edit() if found else None


class Inquiry(Struct, kw_only=True):
    """The model, messages and tools. Messages are `InputMessage`s, and tools `ToolDefinition`s."""

    model: str
    messages: Annotated[list[msgspec.Raw], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    """The system prompt."""
    tools: list[msgspec.Raw] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    """The answer's format."""
    output_format: OutputFormat | None = None
    """The answer's format. An older name of output_config.format."""
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    """How to shorten the conversation."""
    thread: dict[str, Any] | None = None
    """Rejected. Send all messages, because the server stores no conversations."""
    saccade: DocumentOptions | None = None


class Drawing(Struct, kw_only=True):
    """Sampling, and when the answer ends. max_tokens 0: only compute the prompt."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Maximum tokens of the answer. With 0, the server only computes the prompt and caches it."""
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Sample from this many most likely tokens only. 0 removes the limit."""
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None


class Sender(Struct, kw_only=True):
    """Information about the client. These fields do not change the answer."""

    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Diagnostics | None = None
    """Request the reason why less of the prompt was cached than possible."""


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
