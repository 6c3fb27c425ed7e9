"""Translates actions on a screen between the client's format and the model's.

Determines which screenshot a call refers to: the latest one before the call, or else the first one
after it. The formats themselves are in other modules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.core.errors import InvalidRequest
from saccade.front.conversation import Chat, Message, MessageText, tool_call
from saccade.front.extras import find_extra, with_extra
from saccade.front.prepared import Preparation
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.step_order import StepContext
from saccade.front.steps.form_answer import WrittenCalls
from saccade.media.opened import Opened, OpenedImage, OpenedVideo
from saccade.plugins.computer.action import Point
from saccade.plugins.computer.action_format import WrittenActions
from saccade.plugins.computer.action_tool import (
    ACT,
    NO_ACTIONS,
    ActionTool,
    PastAction,
    PastActions,
)
from saccade.plugins.computer.find_format import find_action_format
from saccade.plugins.computer.screen import Screen
from saccade.plugins.computer.translator import ActionTranslator
from saccade.text.grammar.tools import Tool, ToolSet

log = logging.getLogger("saccade")


@dataclass(frozen=True, slots=True)
class Screenshot:
    """The size of a screenshot in the chat, before and after it was resized for the model."""

    message: int  # the index of its message
    size: Point  # (width, height) of the image
    seen: Point  # (width, height) of the image that the model gets
    answers: bool  # it is the result of a call


class TranslateActions:
    """Translates actions in chats with a computer or a browser."""

    def __init__(self, context: StepContext) -> None:
        """Set up the translation for one model, whose family determines the units of
        coordinates.
        """
        self._spec = context.spec
        self._form = find_action_format(context.spec.family, context.model)
        self._in_pixels = self._form.in_pixels(context.spec.family)
        self._prompts = context.prompts
        log.info("computer use: %s (%s)", self._form.name, self._form.note)

    async def begin(self, preparation: Preparation) -> None:
        """Add the tools that the model was trained with to the chat. Coordinates are translated
        later, when the sizes of the screenshots are known.
        """
        request, written = preparation.request, self._form.written
        if written is not None:
            preparation.extras = with_extra(preparation.extras, WrittenCalls(written.calls))
        tool, screen = _tool(request), self._screen_now(request, ())
        offering = self._offering(request.chat, self._translator(tool), screen)
        preparation.request = replace(request, prompt=offering)

    async def place(self, preparation: Preparation) -> None:
        """Translate the chat's history to the model's format, and set up the translation of the
        answer.

        Raises InvalidRequest for a call with a point outside of its screen.
        """
        request, opened = preparation.request, preparation.opened
        translator = self._translator(_tool(request))
        screen, cursor = self._screen_now(request, opened), _cursor(request.chat.messages)
        preparation.request = self._placed(request, opened, translator)
        videos = [each.text for each in opened if isinstance(each, OpenedVideo)]
        preparation.encoded = await self._prompts.encode(
            preparation.request, preparation.readable, videos
        )
        preparation.reading = replace(
            preparation.reading, translate=lambda inner: translator.reader(inner, screen, cursor)
        )

    def _placed(
        self, request: GenerationRequest, opened: Sequence[Opened], translator: ActionTranslator
    ) -> GenerationRequest:
        chat, shots = request.chat, _screenshots(request.chat, opened)
        screen = self._screen(translator.tool, shots, len(chat.messages))
        messages: Sequence[Message] = [
            self._told(translator, message, index, shots) if _actions(message) else message
            for index, message in enumerate(chat.messages)
        ]
        if (written := self._form.written) is not None:
            messages = [*_in_text(messages, written, translator)]
        chat = replace(chat, messages=tuple(messages))
        return replace(request, prompt=self._offering(chat, translator, screen))

    # ---- tools

    def _translator(self, tool: ActionTool) -> ActionTranslator:
        return ActionTranslator(self._form, tool, self._in_pixels)

    def _offering(self, chat: Chat, translator: ActionTranslator, screen: Screen | None) -> Chat:
        """Return the chat with the model's action tools added to the client's functions."""
        beside, written = translator.tool.beside, self._form.written
        if not translator.tool.offered:
            return replace(chat, tools=beside if beside != ToolSet() else None)
        if written is not None and beside.tools:
            raise InvalidRequest(
                f"tools: this model writes actions as text ({self._form.name}), which does not "
                "support other functions: send only the computer",
                "tools",
                "unsupported_parameter",
            )
        tools = translator.tools(screen, must=beside.choice not in (None, "auto", "none"))
        _check_names(beside.tools, tools)
        told = ToolSet(
            (*beside.tools, *tools),
            _choice(beside.choice, tools),
            beside.parallel and written is None,
            hidden=written is not None,
            late=True,
        )
        return replace(chat, tools=told)

    # ---- screens

    def _screen_now(self, request: GenerationRequest, opened: Sequence[Opened]) -> Screen | None:
        chat = request.chat
        return self._screen(_tool(request), _screenshots(chat, opened), len(chat.messages))

    def _screen(self, tool: ActionTool, shots: Sequence[Screenshot], message: int) -> Screen | None:
        """Return the size and coordinate format of the screen on which a message's actions act, or
        None if the size is unknown.

        The size is the one declared with the tool, or else that of the screenshot that the message
        refers to.

        message: the message's index in the chat.
        """
        display, shot = tool.display, _current(shots, message)
        size = display or (None if shot is None else shot.size)
        if size is None:
            return None
        if not self._in_pixels:
            return Screen.in_thousandths(size)
        return Screen.in_pixels(size, self._resized(size) if shot is None else shot.seen)

    def _resized(self, size: Point) -> Point:
        canvas = self._spec.recipe(size[1], size[0], self._spec.pixel_bounds).canvas
        return canvas[1], canvas[0]

    # ---- history

    def _told(
        self,
        translator: ActionTranslator,
        message: Message,
        index: int,
        shots: Sequence[Screenshot],
    ) -> Message:
        """Return the assistant message with each action in the model's format."""
        screen, actions = self._screen(translator.tool, shots, index), _actions(message)
        calls: list[dict[str, Any]] = []
        for number, call in enumerate(message.fields["tool_calls"]):
            past = actions.get(number)
            if past is None:
                calls.append(call)
                continue
            if screen is not None:
                _check_on(screen, past)
            for name, arguments in translator.told(past.action, past.words, screen):
                calls.append(tool_call(call.get("id"), name, arguments))
        fields = {**message.fields, "tool_calls": calls}
        return replace(message, fields=fields, extras=())


def _tool(request: GenerationRequest) -> ActionTool:
    tool = find_extra(request.extras, ActionTool)
    assert tool is not None
    return tool


def _actions(message: Message) -> Mapping[int, PastAction]:
    return (find_extra(message.extras, PastActions) or NO_ACTIONS).by_call


def _check_on(screen: Screen, past: PastAction) -> None:
    for point in past.action.path:
        corner = past.action.kind == "zoom" and point == past.action.path[-1]
        if not screen.holds((point[0] - corner, point[1] - corner)):
            raise InvalidRequest(
                f"{past.place}: {point} is outside the screen, which is {screen.x.size} x "
                f"{screen.y.size} pixels",
                past.place,
            )


def _check_names(functions: Sequence[Tool], tools: Sequence[Tool]) -> None:
    taken = {tool.name for tool in tools}
    for tool in functions:
        if tool.name in taken:
            where = f"{tool.place}.name"
            raise InvalidRequest(
                f"{where}: {tool.name!r} is this model's own name for {tools[0].place}: choose "
                "another name",
                where,
            )


def _choice(choice: Any, tools: Sequence[Tool]) -> Any:
    acting = [{"type": "function", "function": {"name": tool.name}} for tool in tools]
    if choice == ACT:
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": acting}}
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}:
            named = [each for given in allowed for each in (acting if given == ACT else [given])]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return choice


def _screenshots(chat: Chat, opened: Sequence[Opened]) -> list[Screenshot]:
    """Return the chat's screenshots in order, without results of `zoom` and pages of documents."""
    zoomed = {
        call.get("id")
        for message in chat.messages
        for number, call in enumerate(message.fields.get("tool_calls", ()))
        if number in _actions(message) and _actions(message)[number].action.kind == "zoom"
    }
    images, found = iter(opened), list[Screenshot]()
    for index, message in enumerate(chat.messages):
        for _ in message.media:
            image = next(images, None)
            if not isinstance(image, OpenedImage) or image.kind != "still":
                continue
            call = message.fields.get("tool_call_id")
            if message.role == "assistant" or (call is not None and call in zoomed):
                continue
            height, width = image.probe.upright
            seen = image.image.canvas[1], image.image.canvas[0]
            found.append(Screenshot(index, (width, height), seen, call is not None))
    return found


def _current(shots: Sequence[Screenshot], message: int) -> Screenshot | None:
    """Return the latest screenshot before a message, or None if the chat has none.

    Screenshots in results of calls take precedence over images from the user. If there is none
    before the message, the chat's first screenshot is returned.
    """
    before = [each for each in shots if each.message < message]
    results = [each for each in before if each.answers]
    return next(iter((results or before)[-1:] or shots[:1]), None)


def _cursor(messages: Sequence[Message]) -> Point | None:
    for message in reversed(messages):
        for _, past in sorted(_actions(message).items(), reverse=True):
            action = past.action
            if action.path and action.kind != "zoom":
                return action.path[-1]
    return None


# ---- models that write actions as text


def _in_text(
    messages: Sequence[Message], written: WrittenActions, translator: ActionTranslator
) -> Iterator[Message]:
    """Yield the messages without tool calls. Calls become text of the model, and results text of
    the user.
    """
    instruct = written.instruct(translator.words) if translator.tool.offered else ""
    for message in messages:
        if message.role == "assistant":
            yield _answer_in_text(message, written)
            continue
        role = "user" if message.role == "tool" else message.role
        fields = {name: each for name, each in message.fields.items() if name != "tool_call_id"}
        if role == "user" and instruct:
            first = MessageText(instruct, message.place)
            content = (first, *_parts(message))
            marks = tuple(
                mark if mark.part is None else replace(mark, part=mark.part + 1)
                for mark in message.marks
            )
            message = replace(message, content=content, marks=marks)
            instruct = ""
        yield replace(message, role=role, fields=fields)


def _answer_in_text(message: Message, written: WrittenActions) -> Message:
    calls = message.fields.get("tool_calls", ())
    fields = {name: each for name, each in message.fields.items() if name != "tool_calls"}
    if not calls:
        return message
    said = "\n\n".join(_written(call["function"], written) for call in calls)
    action = MessageText(f"{written.opens} {said}", message.place)
    parts = _parts(message)
    if parts and isinstance(parts[-1], MessageText):
        before = MessageText(f"{parts[-1].text.rstrip()}\n{action.text}", parts[-1].place)
        return replace(message, content=(*parts[:-1], before), fields=fields)
    return replace(message, content=(*parts, action), fields=fields)


def _written(function: Mapping[str, Any], written: WrittenActions) -> str:
    return written.write(function["name"], function["arguments"])


def _parts(message: Message) -> tuple[Any, ...]:
    if isinstance(message.content, str):
        return (MessageText(message.content, message.place),) if message.content else ()
    return message.parts
