"""POST /v1/responses, and stored responses: retrieve, list input items, delete, cancel.

This module also has the response's body, and the responses in progress. `read.py` has the fields,
`items.py` the items, `write.py` the events, `store.py` the stored responses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from saccade.api.chat.fields import ReasoningConfig, Reply
from saccade.api.chat.write import ChatShape
from saccade.api.handlers import SMALL_BODY, Endpoint, RequestHandler, json_response, send_json
from saccade.api.mounting import ApiContext
from saccade.api.stored_objects import Paging
from saccade.api.stream import AnswerContext
from saccade.core.client import Client
from saccade.core.errors import Cancelled, InvalidRequest, NotFound, RequestError
from saccade.core.types import CacheMiss, SamplingParams
from saccade.edge.body import BufferedBody, ReadBody, read_json, while_connected
from saccade.edge.headers import client_of
from saccade.front.answer_update import AnswerUpdate, Finish
from saccade.front.fields import unsupported
from saccade.front.prompt_encoder import GenerationRequest
from saccade.plugins.responses.computer import acts_once
from saccade.plugins.responses.fields import (
    LOGPROBS,
    ResponsesRequest,
    ResponseText,
)
from saccade.plugins.responses.items import (
    PlacedItem,
    ReferenceItem,
    pack,
    pack_output,
    unpack,
)
from saccade.plugins.responses.options import ResponseOptions
from saccade.plugins.responses.read import (
    ResponseInquiry,
    ignored_tools,
    is_run,
    read_responses,
    response_request,
)
from saccade.plugins.responses.store import Packed, ResponseStore, StoredTurn
from saccade.plugins.responses.write import Ended, ResponseEvent, ResponseStream

CANCEL_SECONDS = 1.0
"""Seconds that a cancel waits for the cancelled stream to finish."""
MAX_LISTED, USUALLY_LISTED = 100, 20

_encode = msgspec.json.Encoder().encode


def response_routes(api: ApiContext) -> list[Route]:
    options = api.options.of(ResponseOptions)
    store = ResponseStore(options, api.handler.front.metrics, instance=api.instance)
    responses = _Responses(api.handler, store, options.refuse_unsupported_tools)
    one = "/v1/responses/{id}"
    return [
        Route("/v1/responses", Endpoint(responses.create), methods=["POST"]),
        Route("/v1/responses/input_tokens", Endpoint(responses.count), methods=["POST"]),
        Route(one, responses.retrieve, methods=["GET"]),
        Route(one, responses.delete, methods=["DELETE"]),
        Route(f"{one}/input_items", responses.input_items, methods=["GET"]),
        Route(f"{one}/cancel", responses.cancel, methods=["POST"]),
    ]


@dataclass(slots=True)
class Running:
    """A response that is being streamed.

    group: the ID of its request in the front end.
    """

    response: dict[str, Any]
    group: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class ResponseAsked:
    """A parsed request for a response."""

    request: ResponsesRequest
    requests: list[GenerationRequest]  # a single request, removed when it is prepared
    reply: Reply
    before: StoredTurn | None  # the conversation that it continues
    packed: tuple[Packed, ...] | None  # its items for the store; None if it will not be stored
    comparable: bool  # the response named for a cache comparison is known, or none is named

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the request takes during its answer, except images."""
        before = 0 if self.before is None else self.before.total
        return before + sum(len(item) for _, item in self.packed or ())


class ResponseTeller:
    """Writes one answer in the format of /v1/responses.

    on_end: called once with the complete response.
    """

    def __init__(
        self,
        stream: ResponseStream,
        context: AnswerContext,
        asked: ResponseAsked,
        logprobs: ChatShape,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self._stream = stream
        self._context = context
        self._comparable = asked.comparable
        self._shape = logprobs
        self._on_end = on_end
        self._began = False
        self._finish: Finish | None = None
        self._reasoned = 0  # number of reasoning tokens

    def shown(self, event: AnswerUpdate) -> bytes:
        begun = [] if self._began else self._stream.opening_events()
        self._began = True
        return _sse([*begun, *self._feed(event)])

    def ending(self) -> bytes:
        assert self._finish is not None
        if self._context.prepared[0].silent:
            return _sse(self._end("prewarmed"))
        return _sse(self._end("length" if self._finish == "length" else "stop"))

    def failure(self, error: RequestError) -> bytes:
        if isinstance(error, Cancelled):
            return _sse(self._end("cancelled"))
        return _sse(self._stream.fail(error))

    def keep_update(self, event: AnswerUpdate) -> None:
        self._feed(event)

    def whole(self) -> dict[str, Any]:
        self.ending()
        return self._stream.response

    def _feed(self, event: AnswerUpdate) -> list[ResponseEvent]:
        self._finish = event.finish or self._finish
        logprobs = self._shape.logprobs(event.choice, event.logprobs)
        events = self._stream.feed(event.parts, () if logprobs is None else logprobs.content)
        if self._stream.reasons:
            self._reasoned += event.num_tokens
        return events

    def _end(self, how: Ended) -> list[ResponseEvent]:
        used = self._context.tally.usage
        prompt = used.prompt_tokens_details
        guessed = used.completion_tokens_details
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": prompt.cached_tokens,
                "cache_write_tokens": prompt.cache_write_tokens,
                "image_tokens": prompt.image_tokens,
                **({"video_tokens": prompt.video_tokens} if prompt.video_tokens else {}),
                **prompt.beside,
            },
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self._reasoned,
                **({} if guessed is UNSET else msgspec.structs.asdict(guessed)),
            },
            "total_tokens": used.total_tokens,
        }
        more = {}
        if self._context.prepared[0].request.caching.diagnose:
            missed = self._context.tally.missed
            more["prompt_cache_diagnostics"] = (
                cache_diagnostics(missed)
                if self._comparable
                else {"type": "comparison_response_not_found"}
            )
        if (trace := self._context.trace) is not UNSET:
            more["saccade"] = {
                **self._stream.response.get("saccade", {}),
                **msgspec.to_builtins(trace),
            }
        events = self._stream.closing_events(how, usage, **more)
        self._on_end(self._stream.response)
        return events


class _Responses:
    """The handlers of /v1/responses."""

    def __init__(self, handler: RequestHandler, store: ResponseStore, refuse_tools: bool) -> None:
        self._handler = handler
        self._refuse_tools = refuse_tools
        self._store = store
        self._running: dict[tuple[str, str], Running] = {}  # by client and response ID

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._asked(scope, receive, self._handler.receive_chat) as (found, held):
            await while_connected(receive, self._answer(send, found, held))

    async def count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the tokens in a request's input."""
        async with self._asked(scope, receive) as (found, held):
            self._handler.model_of(found.reply.model)
            intake, context_length = (
                self._handler.front.intake,
                self._handler.front.check_ready().context_length,
            )
            reading = intake.read_prompt(found.requests[0], context_length, held.client, held)
            prompt = await while_connected(receive, reading)
            count = {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
            await send_json(send, count)

    @asynccontextmanager
    async def _asked(
        self, scope: Scope, receive: Receive, read_body: ReadBody = read_json
    ) -> AsyncIterator[tuple[ResponseAsked, BufferedBody]]:
        async with self._handler.admission.admit(scope, receive, read_body) as (body, held):
            reader = partial(read_responses, refuse_tools=self._refuse_tools)
            inquiry = await self._handler.read_body(reader, body)
            before = self._before(inquiry.request, held.client)
            items = self._items(inquiry, held.client)
            named = sum(len(each.item) for each in items if isinstance(each.item, bytes))
            held.reserve(named + (0 if before is None else before.total))
            read = partial(
                exchange,
                inquiry.request,
                items,
                before,
                inquiry.request.delivery.store is not False
                and self._store.fits(held.client, held.nbytes),
                self._comparable(inquiry.request, held.client),
            )
            del inquiry, items  # free each as soon as it is converted
            long = held.nbytes > SMALL_BODY
            found = await self._handler.front.intake.in_thread(read) if long else read()
            del read
            yield found, held

    def _before(self, request: ResponsesRequest, client: Client) -> StoredTurn | None:
        name = request.asked.previous_response_id
        if name is None:
            return None
        return self._store.find(client, name, "previous_response_id").turn

    def _comparable(self, request: ResponsesRequest, client: Client) -> bool:
        name = request.caching.compared
        with suppress(NotFound):
            return name is None or bool(self._store.find(client, name, "prompt_cache_options"))
        return False

    def _items(self, inquiry: ResponseInquiry, client: Client) -> list[PlacedItem]:
        """Return the items of a request. References are replaced with the packed bytes of the
        items.

        Each stored item may be referenced once, which bounds the memory by the sizes of the body
        and of the stored items.
        """
        named = set[str]()
        for placed in inquiry.items:
            if isinstance(item := placed.item, ReferenceItem):
                if item.id in named:
                    where = f"{placed.place}.id"
                    raise InvalidRequest(
                        f"{where}: the item {item.id[:200]!r} is referenced twice: reference it "
                        "once",
                        where,
                    )
                named.add(item.id)
        return [
            replace(each, item=self._store.item(client, each.item.id, f"{each.place}.id"))
            if isinstance(each.item, ReferenceItem)
            else each
            for each in inquiry.items
        ]

    async def _answer(self, send: Send, found: ResponseAsked, held: BufferedBody) -> None:
        client, name = held.client, self._store.name()
        logprobs = LOGPROBS in (found.request.form.include or ())
        shape = ChatShape(self._handler.front.vocabulary, logprobs)

        def tell(context: AnswerContext) -> ResponseTeller:
            prepared = context.prepared[0].request
            model, _ = self._handler.model_of(found.reply.model)
            held.reserve(found.nbytes)
            response = opened(name, model, found, prepared.sampling)
            if found.reply.stream:
                self._running[client.name, name] = Running(response, prepared.id)
            stream = ResponseStream(response, acts_once(found.request.form.tools or ()))
            return ResponseTeller(stream, context, found, shape, partial(self._end, found, held))

        try:
            await self._handler.answer(send, found.reply, tell, found.requests, held)
        finally:
            if running := self._running.pop((client.name, name), None):
                running.ended.set()

    def _end(self, found: ResponseAsked, held: BufferedBody, response: dict[str, Any]) -> None:
        if found.packed is not None:
            answer = tuple(pack_output(item) for item in response["output"])
            turn = StoredTurn(found.packed, answer, found.before)
            self._store.keep(held.client, response["id"], _encode(response), turn)

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise unsupported("stream")
        client, name = client_of(request.scope), request.path_params["id"]
        if running := self._running.get((client.name, name)):
            return json_response(running.response)
        return _json(self._store.find(client, name, "id").body)

    async def delete(self, request: Request) -> Response:
        name = request.path_params["id"]
        self._store.delete(client_of(request.scope), name, "id")
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        client, name = client_of(request.scope), request.path_params["id"]
        running = self._running.get((client.name, name))
        if running is None:  # it has finished already
            return _json(self._store.find(client, name, "id").body)
        self._handler.front.cancel(running.group)
        with suppress(TimeoutError):
            await asyncio.wait_for(running.ended.wait(), CANCEL_SECONDS)
        return json_response(running.response)

    async def input_items(self, request: Request) -> Response:
        client, name = client_of(request.scope), request.path_params["id"]
        paging = Paging.of(request.query_params, USUALLY_LISTED, MAX_LISTED)
        turn = self._store.find(client, name, "id").turn
        *before, last = turn.chain()
        packed = [item for each in before for item in (*each.items, *each.answer)]
        rest = paging.rest([*packed, *last.items], itemgetter(0))
        page = rest[: paging.limit]
        return json_response(
            {
                "object": "list",
                "data": [msgspec.Raw(item) for _, item in page],
                "first_id": page[0][0] if page else None,
                "last_id": page[-1][0] if page else None,
                "has_more": len(rest) > len(page),
            }
        )


def exchange(
    request: ResponsesRequest,
    given: Sequence[PlacedItem],
    before: StoredTurn | None,
    keeps: bool,
    comparable: bool,
) -> ResponseAsked:
    """Convert a request to a chat that includes the conversation before it.

    given: the request's items, of which some are packed.
    keeps: whether the items will be stored.
    comparable: as in `ResponseAsked`.

    Raises InvalidRequest with the client's name for the field.
    """
    turns = [] if before is None else before.chain()
    past = [unpack(item) for turn in turns for _, item in (*turn.items, *turn.answer)]
    items = [
        replace(each, item=unpack(each.item)) if isinstance(each.item, bytes) else each
        for each in given
    ]
    made = response_request(request, past, items)
    packed = tuple(pack(each.item) for each in items) if keeps else None  # type: ignore[arg-type]
    delivery = request.delivery
    reply = Reply(model=request.scope.model, stream=delivery.stream, saccade=delivery.saccade)
    return ResponseAsked(request, [made], reply, before, packed, comparable)


def cache_diagnostics(missed: CacheMiss | None) -> dict[str, Any]:
    """Return the cache diagnostics in OpenAI's format. It has fewer reasons, so all reasons except
    a changed prompt become "unavailable".

    `saccade_reason` and `saccade_place` have the details.
    """
    if missed is None:
        return {"type": "cache_hit"}
    place = missed.place
    found = {"saccade_reason": missed.reason, "saccade_place": place}
    if missed.reason not in ("prompt_changed", "other_settings"):
        return {"type": "unavailable", **found}
    changed = "tools_changed" if place.startswith("tools") else "input_changed"
    figures = {"cache_missed_tokens": missed.tokens, "comparison_reusable_tokens": missed.token}
    return {"type": "cache_miss", "reason": changed, **figures, **found}


def opened(name: str, model: str, found: ResponseAsked, sampling: SamplingParams) -> dict[str, Any]:
    """Return the body of a new response, which has no output yet.

    name: its ID.
    """
    request = found.request
    form, delivery = request.form, request.delivery
    text, reasoning = form.text or ResponseText(), form.reasoning or ReasoningConfig()
    kind = {"type": "text"} if text.format is None else _given(text.format)
    ignored = ignored_tools(form)
    # Fields that have no effect here have the default values of OpenAI's API.
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.asked.instructions,
        "max_output_tokens": request.ending.max_output_tokens,
        "max_tool_calls": form.max_tool_calls,
        "metadata": delivery.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": form.parallel,
        "previous_response_id": request.asked.previous_response_id,
        "prompt_cache_key": request.caching.prompt_cache_key,
        "reasoning": {
            "effort": form.effort,
            "summary": reasoning.summary or reasoning.generate_summary,
        },
        "safety_identifier": delivery.safety_identifier,
        "service_tier": "default",
        "store": found.packed is not None,
        "temperature": sampling.temperature,
        "text": {"format": kind, "verbosity": text.verbosity or "medium"},
        "tool_choice": form.tool_choice or "auto",
        "tools": [tool for tool in form.tools or () if is_run(tool)],
        "top_logprobs": form.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": request.asked.truncation or "disabled",
        "usage": None,
        "user": delivery.user,
        **({"saccade": {"ignored_tools": ignored}} if ignored else {}),
    }


def _given(value: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.asdict(value)
    return {name: each for name, each in fields.items() if each is not None}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _sse(events: Iterable[ResponseEvent]) -> bytes:
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + _encode(event) + b"\n\n"
        for event in events
    )
