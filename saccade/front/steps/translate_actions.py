"""What a model does to a screen, between the client's words and the model's.

Owns which screenshot counts for a call: the newest before it, or else the first behind it. Knows no
API's and no model's words (`text/actions/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.core.errors import InvalidRequest
from saccade.front.conversation import Chat, Message, MessageText, PastAction, tool_call
from saccade.front.prepared import Preparation
from saccade.front.prompt_encoder import GenerationRequest, PromptEncoder
from saccade.media.opened import Opened, OpenedImage, OpenedVideo
from saccade.text.actions.action import Point
from saccade.text.actions.action_format import ActionFormat, WrittenActions
from saccade.text.actions.action_tool import ACT
from saccade.text.actions.screen import Screen
from saccade.text.actions.translator import ActionTranslator
from saccade.text.grammar.tools import Tool, ToolSet

Resized = Callable[[Point], Point]
"""From an image's (width, height) to that which the model sees."""


@dataclass(frozen=True, slots=True)
class Screenshot:
    """An image of the screen: its message, its own (width, height), and that which the model sees.
    answers: it is a call's result.
    """

    message: int
    size: Point
    seen: Point
    answers: bool


class TranslateActions:
    """For chats with a computer or a browser."""

    def __init__(
        self, form: ActionFormat, family: str, prompts: PromptEncoder, resized: Resized
    ) -> None:
        """Translate for one model. `family`: decides what its coordinates count."""
        self._form = form
        self._in_pixels = form.in_pixels(family)
        self._prompts = prompts
        self._resized = resized

    async def begin(self, preparation: Preparation) -> None:
        """Offer the model's own tools. Coordinates wait until the screenshots are open."""
        chat = preparation.request.chat
        offering = self._offering(chat, self._translator(chat), self._screen_now(chat, ()))
        preparation.request = replace(preparation.request, prompt=offering)

    async def place(self, preparation: Preparation) -> None:
        """Tell history in the model's words, and prepare to read the answer.

        Raises InvalidRequest that names a call outside its screen.
        """
        request, opened = preparation.request, preparation.opened
        translator = self._translator(request.chat)
        screen, cursor = self._screen_now(request.chat, opened), _cursor(request.chat.messages)
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
        screen = self._screen(chat, shots, len(chat.messages))
        messages: Sequence[Message] = [
            self._told(translator, chat, message, index, shots) if message.actions else message
            for index, message in enumerate(chat.messages)
        ]
        if (written := self._form.written) is not None:
            messages = [*_in_text(messages, written, translator)]
        edit = request.edit and request.edit.naming(_names(chat.messages))
        chat = replace(chat, messages=tuple(messages))
        return replace(request, edit=edit, prompt=self._offering(chat, translator, screen))

    # ---- tools

    def _translator(self, chat: Chat) -> ActionTranslator:
        assert chat.action_tool is not None
        return ActionTranslator(self._form, chat.action_tool, self._in_pixels)

    def _offering(self, chat: Chat, translator: ActionTranslator, screen: Screen | None) -> Chat:
        """Return a chat with the model's tools beside the client's functions."""
        beside, written = translator.tool.beside, self._form.written
        if not translator.tool.offered:
            return replace(chat, tools=beside if beside != ToolSet() else None)
        if written is not None and beside.tools:
            raise InvalidRequest(
                f"tools: this model acts on a screen in text ({self._form.name}) and has no place "
                "for functions beside it: send the computer alone",
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
        )
        return replace(chat, tools=told)

    # ---- screens

    def _screen_now(self, chat: Chat, opened: Sequence[Opened]) -> Screen | None:
        return self._screen(chat, _screenshots(chat, opened), len(chat.messages))

    def _screen(self, chat: Chat, shots: Sequence[Screenshot], message: int) -> Screen | None:
        """Return the screen as the model knows it before a message, or None before it knows any."""
        assert chat.action_tool is not None
        display, shot = chat.action_tool.display, _current(shots, message)
        size = display or (None if shot is None else shot.size)
        if size is None:
            return None
        if not self._in_pixels:
            return Screen.in_thousandths(size)
        return Screen.in_pixels(size, self._resized(size) if shot is None else shot.seen)

    # ---- history

    def _told(
        self,
        translator: ActionTranslator,
        chat: Chat,
        message: Message,
        index: int,
        shots: Sequence[Screenshot],
    ) -> Message:
        """Return the model's turn with each action in the model's words."""
        screen = self._screen(chat, shots, index)
        calls: list[dict[str, Any]] = []
        for number, call in enumerate(message.fields["tool_calls"]):
            past = message.actions.get(number)
            if past is None:
                calls.append(call)
                continue
            if screen is not None:
                _check_on(screen, past)
            for name, arguments in translator.told(past.action, past.words, screen):
                calls.append(tool_call(call.get("id"), name, arguments))
        return replace(message, fields={**message.fields, "tool_calls": calls}, actions={})


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
                f"{where}: {tool.name!r} is what this model calls {tools[0].place}: choose another "
                "name",
                where,
            )


def _choice(choice: Any, tools: Sequence[Tool]) -> Any:
    """Return a tool choice in which the model's own tools stand for an action."""
    acting = [{"type": "function", "function": {"name": tool.name}} for tool in tools]
    if choice == ACT:
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": acting}}
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}:
            named = [each for given in allowed for each in (acting if given == ACT else [given])]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return choice


def _screenshots(chat: Chat, opened: Sequence[Opened]) -> list[Screenshot]:
    """Return the images of the screen, in order. A part of it is none, as `zoom` shows it, nor is a
    document's page.
    """
    zoomed = {
        call.get("id")
        for message in chat.messages
        for number, call in enumerate(message.fields.get("tool_calls", ()))
        if number in message.actions and message.actions[number].action.kind == "zoom"
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
    """Return the screenshot that counts before a message. Results of calls count before images that
    the user has sent.
    """
    before = [each for each in shots if each.message < message]
    results = [each for each in before if each.answers]
    return next(iter((results or before)[-1:] or shots[:1]), None)


def _names(messages: Sequence[Message]) -> dict[str, str]:
    """Return the client's names for calls that act, by their ids."""
    return {
        call.get("id", ""): call["function"]["name"]
        for message in messages
        for number, call in enumerate(message.fields.get("tool_calls", ()))
        if number in message.actions
    }


def _cursor(messages: Sequence[Message]) -> Point | None:
    """Return the last place that an action had."""
    for message in reversed(messages):
        for number in sorted(message.actions, reverse=True):
            action = message.actions[number].action
            if action.path and action.kind != "zoom":
                return action.path[-1]
    return None


# ---- models that act in text


def _in_text(
    messages: Sequence[Message], written: WrittenActions, translator: ActionTranslator
) -> Iterator[Message]:
    """Yield messages without tools: calls are the model's text, and results are the user's."""
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
