"""POST /internal/embedding, the only API of a server with role encode: returns the embedding of an
image, given its bytes or its key (`exchange.py` defines the messages).

Handles a request in this order: check that this vision encoder can serve it, acquire a permit, read
the body, open the image like any client's, run the engine, send the result from shared memory.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import accumulate

import msgspec
from blake3 import blake3
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from saccade.api.handlers import Endpoint, RequestHandler
from saccade.api.mounting import ApiContext
from saccade.core.decoders import json_decoder
from saccade.core.errors import ImageError, InvalidRequest, NotFound, OtherTower
from saccade.core.types import Image, Request, SamplingParams, Span
from saccade.core.video import MAX_FRAMES, VideoRules, check_video_options
from saccade.edge.body import BufferedBody, read_whole, while_connected
from saccade.front.answer_update import AnswerUpdate
from saccade.front.prepared import PreparedRequest
from saccade.media.content import Budget
from saccade.media.opened import OpenedImage
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import ImageSource, Source, VideoSource
from saccade.plugins.encoder.exchange import (
    ENCODE_PATH,
    REQUEST_HEADER,
    RESULT_HEADER,
    EmbeddingRequest,
    EmbeddingResult,
)

PIECE = 256 * 1024
"""Number of bytes that are written to the connection at a time."""
MAX_PIXELS = 1 << 48
UNKNOWN = "no embedding with this key is cached: send the image's bytes"


def encode_routes(api: ApiContext) -> Sequence[Route]:
    embedding = EmbeddingHandler(api.handler).embedding
    return (Route(ENCODE_PATH, Endpoint(embedding), methods=["POST"]),)


class EmbeddingHandler:
    """The handler of POST /internal/embedding."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._front = handler.front
        self._media = handler.front.intake.media

    async def embedding(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = self._read(Headers(scope=scope).get(REQUEST_HEADER, ""))
        async with self._handler.admission.admit(scope, receive, read_whole) as (body, held):
            await while_connected(receive, self._answer(send, wanted, bytes(body), held))

    def _read(self, text: str) -> EmbeddingRequest:
        try:
            wanted = json_decoder(EmbeddingRequest).decode(text)
            self._check_size(wanted.image)
            tokens = self._front.intake.spec.num_tokens(wanted.image.grid)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise InvalidRequest(f"{REQUEST_HEADER}: {error}", REQUEST_HEADER) from None
        image, mine = wanted.image, self._front.check_ready().tower
        if wanted.tower != mine:
            raise OtherTower(
                f"the request is for the vision encoder {_name(wanted.tower.fingerprint)} in "
                f"{wanted.tower.dtype}; this server has {_name(mine.fingerprint)} in "
                f"{mine.dtype}: use the same checkpoint, --dtype, --device and --patch-embed for "
                "both servers, on the same type of CPU or GPU"
            )
        if tokens != image.num_tokens:
            raise InvalidRequest(
                f"{REQUEST_HEADER}: the image is invalid for this model", REQUEST_HEADER
            )
        if not self._media.holds(mine.nbytes(tokens)):
            raise _too_large("num_tokens", tokens)
        return wanted

    def _check_size(self, image: Image) -> None:
        """Check all numbers in an image's description before they are used. Raises
        InvalidRequest.
        """
        most = self._front.intake.spec.largest_image.pixels  # also bounds tokens and patches
        numbers: tuple[int, ...]
        for name, numbers in (
            ("grid", image.grid),
            ("num_tokens", (image.num_tokens,)),
            ("num_patches", (image.num_patches,)),
            ("canvas", image.canvas),
        ):
            if max(numbers) > most:
                raise _too_large(name, max(numbers))
            if min(numbers) < (name != "grid"):
                raise InvalidRequest(
                    f"{REQUEST_HEADER}: the image is invalid for this model", REQUEST_HEADER
                )
        if not self._media.holds(3 * math.prod(image.canvas)):
            raise _too_large("canvas", math.prod(image.canvas))

    async def _answer(
        self, send: Send, wanted: EmbeddingRequest, body: bytes, held: BufferedBody
    ) -> None:
        opened = await self._open(wanted, body, held) if body else None
        prepared = _prepare(wanted, opened, held)
        try:
            async with self._embedded(prepared) as event:
                await self._send(send, wanted, event)
        except ImageError as error:
            if opened is None:  # the image is neither cached nor in the request
                raise NotFound(UNKNOWN) from error
            raise

    async def _open(self, wanted: EmbeddingRequest, body: bytes, held: BufferedBody) -> OpenedImage:
        """Open the image like any client's. Raises OtherTower if the result is not the requested
        image.
        """
        client, salt = held.client, wanted.image.key.salt
        requester = Requester(client.share(""), client.name, held, client.tenant(salt))
        source = source_of(wanted, body, self._front.intake.spec.video)
        (found,) = await self._media.open_all((source,), salt, requester)
        (opened,) = found.images
        if opened.image != wanted.image:
            raise OtherTower(
                "this server derives another image from the bytes and settings: use the same "
                "checkpoint for both servers",
                code="wrong_settings",
            )
        return opened

    @asynccontextmanager
    async def _embedded(self, prepared: PreparedRequest) -> AsyncIterator[AnswerUpdate]:
        """Run the engine, and yield its last update. The embedding stays in shared memory until the
        context exits.
        """
        try:
            async with aclosing(self._front.generate(prepared)) as events:
                async for event in events:
                    yield event
        finally:
            self._front.taken(f"{prepared.request.id}-0")  # also if the embedding arrived too late

    async def _send(self, send: Send, wanted: EmbeddingRequest, event: AnswerUpdate) -> None:
        assert event.embedding is not None
        found = event.found[0]
        values = self._media.embedding(*event.embedding)
        digest = await self._front.intake.in_thread(partial(_digest, values))
        given = EmbeddingResult(wanted.tower, wanted.image.num_tokens, digest, found.encode_ms)
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(len(values)).encode()),
            (RESULT_HEADER.encode(), msgspec.json.encode(given)),
        ]
        source = "cache" if found.level == "embedding" else "tower"
        self._front.metrics.inc("saccade_embeddings_sent_total", source=source)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(values), PIECE):
            piece = bytes(values[start : start + PIECE])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def source_of(wanted: EmbeddingRequest, body: bytes, rules: VideoRules | None) -> Source:
    """Convert the body to an image or frames, as clients send them. Raises InvalidRequest."""
    if wanted.frames is None:
        budget = Budget(wanted.detail, wanted.min_pixels, wanted.max_pixels)
        return ImageSource(body, "image", budget)
    sizes, count = wanted.nbytes, wanted.frames.count
    most = rules.frames if rules else 0
    if not 1 <= len(sizes) <= min(most, count) or min(sizes) < 1 or sum(sizes) != len(body):
        raise InvalidRequest(
            f"{REQUEST_HEADER}: nbytes is {str(sizes)[:100]}: it must list the sizes of 1 to "
            f"{most} frames, whose sum is the body's {len(body)} bytes",
            REQUEST_HEADER,
        )
    if count > MAX_FRAMES:
        raise _too_large("frames.count", count)
    options = wanted.frames.wishes
    check_video_options(options, REQUEST_HEADER)
    pixels = options.min_pixels, options.max_pixels, options.total_pixels
    if not all(each is None or 0 < each < MAX_PIXELS for each in pixels):
        raise InvalidRequest(
            f"{REQUEST_HEADER}: pixels of frames must be from 1 to {MAX_PIXELS - 1}", REQUEST_HEADER
        )
    ends = tuple(accumulate(sizes))
    files = tuple(body[end - size : end] for end, size in zip(ends, sizes, strict=True))
    return VideoSource(files, "image", options, count=count)


def _too_large(field: str, number: int) -> InvalidRequest:
    return InvalidRequest(
        f"{REQUEST_HEADER}: {field} is {number}: it exceeds this model's largest image, or shared "
        "memory (--tune arena_mb)",
        REQUEST_HEADER,
    )


def _prepare(
    wanted: EmbeddingRequest, opened: OpenedImage | None, held: BufferedBody
) -> PreparedRequest:
    """Build the engine's request for one image, with placeholder tokens."""
    image = wanted.image
    request = Request(
        secrets.token_hex(12),
        (0,) * image.num_tokens,
        (Span(0, image.num_tokens, 0),),
        (image,),
        SamplingParams(max_tokens=1),
        image.key.salt,
        time.monotonic(),
        held.client.share(image.key.salt),
    )
    return PreparedRequest(request, () if opened is None else (opened,), ("image",))


def _digest(values: memoryview) -> str:
    return blake3(values).hexdigest()


def _name(fingerprint: str) -> str:
    return fingerprint[:12] or "(none)"
