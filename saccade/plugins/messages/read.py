"""Converts Anthropic's bodies to conversations.

A body's messages, blocks, tools and settings become a `GenerationRequest`, in which each part has
its path in the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from saccade.api.chat.fields import Reply
from saccade.api.chat.read import read_rules
from saccade.core.config import WHOLE_DOCUMENT, DocumentView
from saccade.core.errors import InvalidRequest
from saccade.core.types import FieldNames
from saccade.front.breakpoints import CacheControl, CacheRequest, Mark, control_mark
from saccade.front.content import MAX_CALLS, check_lengths
from saccade.front.conversation import Chat, Message, MessageText, Part, tool_call
from saccade.front.extras import extras_of
from saccade.front.fields import Reader, image_url
from saccade.front.image_parts import region_of
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.video_parts import (
    NO_VIDEO_DEFAULTS,
    VIDEO_OPTIONS,
    AnyVideoPart,
    InputVideoPart,
    VideoPart,
    read_video,
)
from saccade.media.content import Budget
from saccade.media.sources.source import (
    Address,
    Base64,
    Digest,
    FileId,
    ImageSource,
    RegionSource,
    SentFile,
    VideoSource,
)
from saccade.plugins.agents.history_edits import AskedEdit
from saccade.plugins.computer.action_tool import ACT, ActionTool, PastAction, PastActions
from saccade.plugins.messages.fields import (
    COUNT_TOKENS,
    MESSAGES,
    Base64Source,
    Block,
    CountTokensRequest,
    DigestSource,
    DocumentBlock,
    FileSource,
    FramesSource,
    ImageBlock,
    InputMessage,
    Inquiry,
    MarkedBlock,
    MediaBlock,
    MessagesRequest,
    PartsSource,
    PDFBytes,
    PlainSource,
    RedactedBlock,
    Shown,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolKind,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
    VideoBlock,
    VideoBytes,
)
from saccade.plugins.messages.refuse_oversized import Undiminished
from saccade.plugins.messages.toolsets import (
    ACTION_TYPES,
    FAMILIES,
    BrowserState,
    acts,
    read_action_tool,
    read_past,
)
from saccade.text.grammar.constraint import OutputConstraint
from saccade.text.grammar.tools import Tool, ToolSet, read_each, read_function

_ATTRIBUTION = "x-anthropic-billing-header:"
"""Prefix of a system block that Anthropic uses for accounting. The block is removed, because it
differs in each request, so the text after it could never be cached.
"""

_MESSAGE: Reader[InputMessage] = Reader(InputMessage)
_TOOL: Reader[ToolDefinition] = Reader(ToolDefinition)
_KIND: Reader[ToolKind] = Reader(ToolKind)


@dataclass(frozen=True, slots=True)
class AskedMessage:
    """A parsed body."""

    requests: list[GenerationRequest]  # a single request, which the caller removes
    reply: Reply
    most: int = 0  # the maximum tokens of the answer
    shows_thinking: bool = True
    manages_context: bool = False  # the answer reports the effect of edits


def read_message(body: bytearray, context_length: int) -> AskedMessage:
    """Read a request for an answer. Raises InvalidRequest with Anthropic's name for the field."""
    request = MESSAGES.read(body, context_length)
    thinking, drawing = request.inquiry.thinking, request.drawing
    return AskedMessage(
        [message_request(request, context_length)],
        Reply(model=request.inquiry.model, stream=drawing.stream),
        drawing.max_tokens,
        thinking is None or thinking.display != "omitted",
        request.inquiry.context_management is not None,
    )


def read_count(body: bytearray, context_length: int) -> AskedMessage:
    """Read a request to count tokens. Raises InvalidRequest with Anthropic's name for the field."""
    request = COUNT_TOKENS.read(body, context_length)
    return AskedMessage(
        [message_request(request, context_length)],
        Reply(model=request.inquiry.model),
        manages_context=request.inquiry.context_management is not None,
    )


def message_request(
    request: CountTokensRequest | MessagesRequest, context_length: int
) -> GenerationRequest:
    """Convert a body to a request. Raises InvalidRequest for errors beyond the schema."""
    inquiry = request.inquiry
    if inquiry.thread is not None:
        raise InvalidRequest(
            "thread: this server does not store conversations: send all messages",
            "thread",
            "thread_unsupported_request",  # the code on which the SDK sends all messages
        )
    # The messages, the system prompt first.
    check_lengths(inquiry.messages, context_length, "messages")
    own = inquiry.saccade
    tools, tool_marks, acting = _read_tools(inquiry.tools)
    conversation = _Conversation(WHOLE_DOCUMENT if own is None else own.view, acting)
    if inquiry.system:
        conversation.add_system(inquiry.system)
    for index, raw in enumerate(inquiry.messages):
        place = f"messages[{index}]"
        conversation.add_message(_MESSAGE.json(raw, place), place)
    if inquiry.cache_control is not None:
        conversation.add_breakpoint(inquiry.cache_control)
    # An answer that the client has started is continued.
    final = conversation.messages[-1]
    continues = final.role == "assistant" and "tool_calls" not in final.fields
    thinking = inquiry.thinking
    last = f"messages[{len(inquiry.messages) - 1}].content"
    names = {"stop": "stop_sequences", "prompt": "messages", "continue_final_message": last}
    tool_set, acting = _tool_set(tools, inquiry.tool_choice, acting), conversation.acting
    if acting is not None:
        tool_set, acting = None, replace(acting, beside=tool_set or ToolSet())
    chat = Chat(
        tuple(conversation.messages),
        tool_set,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        thinks=None if thinking is None else thinking.type != "disabled",
        tool_marks=tool_marks,
    )
    edit = None if inquiry.context_management is None else inquiry.context_management.edit()
    asked_edit = None if edit is None else AskedEdit(edit)
    whole = frozenset(conversation.undiminished)
    budget = None
    if thinking is not None and thinking.type != "disabled":
        budget = thinking.budget_tokens
    diagnose = isinstance(request, MessagesRequest) and request.sender.diagnostics is not None
    return GenerationRequest(
        chat,
        _sampling(request) if isinstance(request, MessagesRequest) else {},
        constraint=_constraint(inquiry),
        cache=CacheRequest(diagnose=diagnose),
        names=FieldNames(names),
        rules=read_rules(None, budget),
        extras=extras_of(acting, asked_edit, Undiminished(whole) if whole else None),
    )


def _constraint(inquiry: Inquiry) -> OutputConstraint | None:
    """Return the output format that the request asks for, or None.

    It is read from `output_config.format`, or else from the deprecated `output_format`.
    """
    config = inquiry.output_config
    if config is not None and config.format is not None:
        return OutputConstraint("json", config.format.schema, "output_config.format.schema")
    older = inquiry.output_format
    return None if older is None else OutputConstraint("json", older.schema, "output_format.schema")


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    drawing = request.drawing
    given = {
        "max_tokens": max(1, drawing.max_tokens),
        "stop": tuple(drawing.stop_sequences or ()),
        "temperature": drawing.temperature,
        "top_k": drawing.top_k,
        "top_p": drawing.top_p,
    }
    return {name: value for name, value in given.items() if value is not None}


def _tool_set(
    tools: tuple[Tool, ...], choice: ToolChoice | None, acting: ActionTool | None
) -> ToolSet | None:
    if choice is None:
        return ToolSet(tools) if tools else None
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            'tool_choice.name is required with type "tool", and not allowed otherwise',
            "tool_choice.name",
        )
    named: Any = {"type": "function", "function": {"name": choice.name}}
    if acting is not None and choice.name == acting.name:
        named = ACT
    openais: Any = {"any": "required", "tool": named}.get(choice.type, choice.type)
    return ToolSet(tools, openais, not choice.disable_parallel_tool_use)


def _read_tools(
    given: list[msgspec.Raw] | None,
) -> tuple[tuple[Tool, ...], tuple[Mark, ...], ActionTool | None]:
    """Return the functions, the cache breakpoints of all tools, and the computer or browser, which
    is None if the request declares none.
    """
    marks: list[Mark] = []
    acting: list[ActionTool] = []

    def read(raw: msgspec.Raw, place: str) -> Tool | None:
        kind = _KIND.json(raw, place).type
        if kind is not None and acts(kind):
            found = read_action_tool(raw, kind, place)
            if acting:
                raise InvalidRequest(
                    f"{place}: a request may have only one computer or browser", place
                )
            acting.append(found.tool)
            mark(found.mark, place)
            return None
        tool = _read_tool(raw, kind, place)
        mark(tool.cache_control, place)
        return read_function(msgspec.structs.asdict(tool), place, "input_schema")

    def mark(control: CacheControl | None, place: str) -> None:
        if control is not None:
            marks.append(control_mark(control, f"{place}.cache_control"))

    return read_each(given, read), tuple(marks), next(iter(acting), None)


def _read_tool(raw: msgspec.Raw, kind: str | None, place: str) -> ToolDefinition:
    if kind not in (None, "custom"):
        path = f"{place}.type"
        raise InvalidRequest(
            f"{path}: {kind[:100]} is one of Anthropic's own tools; this server supports tools "
            'with an input_schema (type "custom"), and computers and browsers: '
            f"{', '.join(ACTION_TYPES)}",
            path,
            "unsupported_parameter",
        )
    return _TOOL.json(raw, place)


@dataclass(slots=True)
class _Content:
    """A message's parts and cache breakpoints as they are read.

    undiminished: the paths of images, in all messages, that must be rejected instead of downsized.
    """

    view: DocumentView
    undiminished: list[str]
    parts: list[Part] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def show(self, block: Shown | BrowserState, place: str) -> None:
        self.undiminished += _undiminished(block, place)
        self.parts += _parts(block, place, self.view)
        self.mark(block, place, len(self.parts) - 1)

    def mark(
        self, block: MarkedBlock | MediaBlock | BrowserState, place: str, part: int | None = None
    ) -> None:
        """Add the cache breakpoint of a block, if it has one.

        part: the index of the part that it follows. By default, it follows the whole message.
        """
        if block.cache_control is not None:
            where = f"{place}.cache_control"
            self.marks.append(control_mark(block.cache_control, where, part))

    def message(self, role: str, place: str, **fields: Any) -> Message:
        return Message(role, tuple(self.parts), fields, tuple(self.marks), place)


class _Conversation:
    def __init__(self, view: DocumentView, acting: ActionTool | None) -> None:
        """Start without messages.

        view: how documents are shown to the model.
        acting: the computer or browser of the request, if any. Later, it may become one that occurs
        only in the history.
        """
        self.messages: list[Message] = []
        self.acting = acting
        self.undiminished: list[str] = []
        self._view = view

    def add_breakpoint(self, control: CacheControl) -> None:
        """Add a cache breakpoint at the end, unless the last message has one there."""
        final, mark = self.messages[-1], control_mark(control, "cache_control")
        if all(each.part is not None for each in final.marks):
            self.messages[-1] = replace(final, marks=(*final.marks, mark))

    def add_system(self, system: str | list[TextBlock]) -> None:
        """Add the system prompt, which must be first."""
        if isinstance(system, str):
            self.messages.append(Message("system", system, place="system"))
            return
        content = _Content(self._view, self.undiminished)
        for index, block in enumerate(system):
            if not block.text.startswith(_ATTRIBUTION):
                content.show(block, f"system[{index}]")
        if content.parts:
            self.messages.append(content.message("system", "system"))

    def add_message(self, message: InputMessage, place: str) -> None:
        """Add a message. Tool results become separate messages."""
        where = f"{place}.content"
        if isinstance(message.content, str):
            self.messages.append(Message(message.role, message.content, place=where))
        elif message.role == "assistant":
            self._add_answer(message.content, where)
        elif not message.content:
            raise InvalidRequest(f"{where}: the list must have at least one block", where)
        else:
            self._add_blocks(message.role, message.content, where)

    def _add_blocks(self, role: str, blocks: list[Block], where: str) -> None:
        content = _Content(self._view, self.undiminished)
        for index, block in enumerate(blocks):
            place = f"{where}[{index}]"
            match block:
                case TextBlock() | ImageBlock() | VideoBlock() | DocumentBlock():
                    content.show(block, place)
                case ToolResultBlock() if role == "user":
                    if content.parts:
                        self.messages.append(content.message(role, where))
                    content = _Content(self._view, self.undiminished)
                    self._add_result(block, place)
                case _:
                    raise _misplaced(block, place, role)
        if content.parts:
            self.messages.append(content.message(role, where))

    def _add_result(self, block: ToolResultBlock, place: str) -> None:
        content, where = _Content(self._view, self.undiminished), f"{place}.content"
        if block.is_error:  # templates have no field for it
            content.parts.append(MessageText("Error: ", place))
        if isinstance(block.content, str):
            content.parts.append(MessageText(block.content, where))
        else:
            for number, part in enumerate(block.content or ()):
                content.show(part, f"{where}[{number}]")
        content.mark(block, place)
        self.messages.append(content.message("tool", where, tool_call_id=block.tool_use_id))

    def _add_answer(self, blocks: list[Block], where: str) -> None:
        content = _Content(self._view, self.undiminished)
        calls: list[dict[str, Any]] = []
        actions: dict[int, PastAction] = {}
        thoughts: list[str] = []
        last: tuple[ToolUseBlock, str] | None = None
        for index, block in enumerate(blocks):
            place = f"{where}[{index}]"
            match block:
                case TextBlock():
                    content.show(block, place)
                case ToolUseBlock():
                    if (past := self._past(block, place)) is not None:
                        actions[len(calls)] = past
                    calls.append(tool_call(block.id, block.name, block.input))
                    if block.cache_control is not None:
                        last = block, place
                case ThinkingBlock():
                    thoughts += [block.thinking] if block.thinking else []
                case RedactedBlock():
                    pass
                case _:
                    raise _misplaced(block, place, "assistant")
        if len(calls) > MAX_CALLS:
            raise InvalidRequest(
                f"{where}: the message has {len(calls)} tool_use blocks; the limit is {MAX_CALLS}",
                where,
            )
        if last is not None:
            content.mark(*last)
        fields: dict[str, Any] = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        fields |= {"tool_calls": calls} if calls else {}
        text = tuple(content.parts) or (None if calls else "")
        marks = tuple(content.marks)
        extras = extras_of(PastActions(actions) if actions else None)
        self.messages.append(Message("assistant", text, fields, marks, where, extras))

    def _past(self, block: ToolUseBlock, place: str) -> PastAction | None:
        """Return the computer or browser action of a past call, or None if it called a function.

        The request need not declare the call's toolset.
        """
        toolset = block.toolset_name
        past = read_past(block.name, block.input, toolset, self.acting, place)
        if past is not None and self.acting is None and toolset is not None:
            words = FAMILIES[toolset]
            self.acting = ActionTool(toolset, "tools", words, offered=False)
        return past


def _misplaced(block: Block, where: str, role: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    return InvalidRequest(f"{where}: {kind} is not allowed in a message of the {role}", where)


def _undiminished(block: Shown | BrowserState, place: str) -> Iterator[str]:
    """Yield the paths of the images in a block that must be rejected instead of downsized."""
    if isinstance(block, ImageBlock):
        wish = block.transformations
        if wish is not None and wish.oversized_image == "error":
            yield place
    elif isinstance(block, DocumentBlock) and isinstance(block.source, PartsSource):
        for index, each in enumerate(block.source.content):
            if isinstance(each, ImageBlock):
                yield from _undiminished(each, f"{place}.source.content[{index}]")


def _parts(block: Shown | BrowserState, place: str, view: DocumentView) -> list[Part]:
    """Convert a block to message parts.

    view: how documents are shown to the model.
    """
    if isinstance(block, BrowserState):
        return [MessageText(block.text(), place)]
    if isinstance(block, TextBlock):
        return [MessageText(block.text, place)]
    if isinstance(block, ImageBlock):
        budget = Budget(min_pixels=block.min_pixels, max_pixels=block.max_pixels)
        address = _address(block.source)
        if block.region is not None:
            return [RegionSource(address, place, budget, "", region_of(block.region, place))]
        return [ImageSource(address, place, budget)]
    if isinstance(block, VideoBlock):
        return [_video(block, place)]
    heading = "".join(f"{line}\n" for line in (block.title, block.context) if line)
    if isinstance(block.source, PDFBytes | URLSource | FileSource | DigestSource):
        budget = Budget(min_pixels=block.min_pixels, max_pixels=block.max_pixels)
        region = None if block.region is None else region_of(block.region, place)
        return [SentFile(_address(block.source), place, budget, heading, view, block.page, region)]
    if block.page is not None or block.region is not None:
        raise InvalidRequest(
            f"{place}: page and region apply only to PDFs, and this is a text", place
        )
    if isinstance(block.source, PlainSource):
        return [MessageText(heading + block.source.data, f"{place}.source.data")]
    content, where = block.source.content, f"{place}.source.content"
    if isinstance(content, str):
        return [MessageText(heading + content, where)]
    parts: list[Part] = [MessageText(heading, f"{place}.title")] if heading or not content else []
    for index, each in enumerate(content):
        parts += _parts(each, f"{where}[{index}]", view)
    return parts


def _video(block: VideoBlock, place: str) -> VideoSource:
    options: dict[str, Any] = {name: getattr(block, name) for name in VIDEO_OPTIONS}
    match block.source:
        case VideoBytes(data=data):
            part: AnyVideoPart = InputVideoPart(video_data=data, **options)
        case URLSource(url=url):
            part = InputVideoPart(video_url=url, **options)
        case FileSource(file_id=file_id):
            part = InputVideoPart(file_id=file_id, **options)
        case FramesSource(frames=frames):
            part = VideoPart(video=frames, **options)
    return read_video(part, place, NO_VIDEO_DEFAULTS)


def _address(
    source: Base64Source | PDFBytes | URLSource | FileSource | DigestSource,
) -> Address:
    match source:
        case Base64Source(data=data) | PDFBytes(data=data):
            return Base64(data)
        case URLSource(url=url):
            return image_url(url)
        case DigestSource(digest=digest):
            return Digest(digest)
        case FileSource(file_id=file_id):
            return FileId(file_id)
