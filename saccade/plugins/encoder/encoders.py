"""Requests image embeddings from encoder servers (`--encoders`), instead of decoding and encoding
locally.

This module selects an encoder, applies the time limit, and checks the response. After any failure,
this server encodes the image itself, and a metric counts the failure by its kind.

Each image has one preferred encoder, by rendezvous hashing of its digest. All servers therefore
request an image from the encoder that has its embedding cached. An encoder that failed gets no
requests for a while, and its images are requested from another one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from saccade.core.arena import Arena
from saccade.core.config import DISK_BLOCK
from saccade.core.decoders import json_decoder
from saccade.core.errors import ConfigError
from saccade.core.given_paths import regular
from saccade.core.metrics import Metrics
from saccade.core.options import ServeOptions
from saccade.core.plan import PixelSlot
from saccade.core.settings import FetchSettings, RoleSettings
from saccade.core.types import ImageKey, Tower
from saccade.core.video import FrameBudget
from saccade.edge.rank import rank
from saccade.edge.upstream import Head, Upstream, WorkerDisconnected, parse_worker
from saccade.media.embedding_source import EncoderOutcome
from saccade.media.opened import OpenedImage
from saccade.plugins.encoder.exchange import (
    ENCODE_PATH,
    REQUEST_HEADER,
    RESULT_HEADER,
    EmbeddingRequest,
    EmbeddingResult,
)

log = logging.getLogger("saccade")

SEND_CHUNK_BYTES = 16 * DISK_BLOCK
"""Images above this size are first requested by their hash, and sent only if the encoder does not
have them.
"""
MAX_CONCURRENT_REQUESTS = 16
"""Maximum concurrent requests to one encoder. Others wait, and the wait counts in
`fetch_timeout`.
"""
AWAY_SECONDS = 1.0
MAX_AWAY_SECONDS = 60.0
"""Maximum seconds without requests to an encoder after a failure. The pause doubles with each
consecutive failure.
"""
CHECK_SECONDS = 1.0
"""Minimum seconds between two reads of the `--encoders` file."""
CHECK_TIMEOUT = 1.0
"""Maximum seconds to wait for the `--encoders` file. After a timeout, the previous list is used."""
MAX_LISTED = 1 << 16
"""Maximum number of characters that are read from the `--encoders` file."""
MAX_ERROR_BYTES = 2000
"""Maximum bytes that are read from an error response."""


class NoEmbedding(Exception):
    """Raised if an encoder returned no usable embedding.

    kind: the value of `outcome` in `saccade_encoder_images_total`.
    lasting: whether requests for other images are expected to fail, too.
    """

    def __init__(self, kind: str, why: str, lasting: bool = True) -> None:
        super().__init__(why)
        self.kind = kind
        self.lasting = lasting


class _Encoder:
    """The state of one encoder server. After a failure, it gets no requests for `away` seconds,
    until `away_until`.
    """

    def __init__(self, url: str) -> None:
        self.name, host, port = parse_worker(url, "--encoders")
        self.authority = self.name.removeprefix("http://")
        self.upstream = Upstream(host, port)
        self.places = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self.away_until = 0.0
        self.away = 0.0

    def failed(self, why: NoEmbedding) -> None:
        now = time.monotonic()
        if now < self.away_until:
            return  # a concurrent request has already reported the failure
        self.away = min(MAX_AWAY_SECONDS, 2 * self.away or AWAY_SECONDS)
        self.away_until = now + self.away
        log.warning(
            "encoder %s: %s; images are encoded by other encoders or locally", self.name, why
        )

    def answered(self) -> None:
        if self.away:
            log.info("encoder %s responds again", self.name)
        self.away, self.away_until = 0.0, 0.0


class Encoders:
    """All encoder servers.

    They get requests only after `trust` has set the signature of this server's vision encoder,
    since embeddings from a different vision encoder would be wrong.
    """

    def __init__(
        self, settings: RoleSettings, arena: Arena, metrics: Metrics, seconds: float = 10.0
    ) -> None:
        """Read the encoders' URLs from the settings. Raises ConfigError.

        seconds: the time limit per embedding.
        """
        self._settings = settings
        self._seconds = seconds
        self._arena = arena
        self._metrics = metrics
        self._encoders: dict[str, _Encoder] = {}
        self._name(settings.urls)
        self._look_at = 0.0  # when the file is read next
        self._looking = asyncio.Lock()
        self._wrong = ""  # the last error of reading the file
        self.tower = Tower()
        self._tasks: dict[ImageKey, asyncio.Task[EncoderOutcome]] = {}

    def trust(self, tower: Tower) -> None:
        """Use encoders only if they run this vision encoder."""
        self.tower = tower

    async def encode_image(self, opened: OpenedImage, slot: PixelSlot) -> EncoderOutcome:
        """Request the embedding of an opened image, as `encode` does."""
        return await self.encode(*question(opened, self.tower), slot)

    async def encode(
        self, wanted: EmbeddingRequest, data: bytes, slot: PixelSlot
    ) -> EncoderOutcome:
        """Request an embedding and write it to `slot`. After the call has ended, even with an
        error, the slot is not written any more.

        data: the encoded image, or empty if its bytes are not in memory.

        Raises CancelledError after `call_off`.
        """
        key = wanted.image.key
        assert key not in self._tasks, "the engine asks for an image once at a time"
        task = asyncio.create_task(self._request(wanted, data, slot))
        self._tasks[key] = task
        try:
            answer = await task
        finally:
            del self._tasks[key]
        self._metrics.inc("saccade_encoder_images_total", outcome=answer.outcome)
        return answer

    def call_off(self, key: ImageKey) -> None:
        """Cancel the request for an image's embedding."""
        if key in self._tasks:
            self._tasks[key].cancel()

    async def close(self) -> None:
        """Cancel all requests and close all connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for encoder in self._encoders.values():
            encoder.upstream.drop()

    def fits(self, num_tokens: int, slot: PixelSlot) -> bool:
        """Return True if encoders can be used and the embedding fits in the slot."""
        return 0 < self.tower.nbytes(num_tokens) <= slot.embedding_bytes

    async def _request(
        self, wanted: EmbeddingRequest, data: bytes, slot: PixelSlot
    ) -> EncoderOutcome:
        begun = time.monotonic()
        if (file := self._settings.file) is not None:
            async with self._looking:  # concurrent callers wait for the same read
                if begun >= self._look_at:
                    await self._look(file)
                    self._look_at = time.monotonic() + CHECK_SECONDS
        here = [name for name, each in self._encoders.items() if begun >= each.away_until]
        if not here:
            return EncoderOutcome("away")
        # Ignore the encoders' loads: only the preferred encoder can have the embedding cached.
        encoder = self._encoders[rank((wanted.image.key.digest,), here, {})[0]]
        try:
            async with asyncio.timeout(self._seconds), encoder.places:
                given = await self._exchange(encoder, wanted, data, slot)
        except TimeoutError:
            why = NoEmbedding("slow", f"it sent no embedding within {self._seconds:g} s")
        except WorkerDisconnected as gone:
            why = NoEmbedding("unreachable", str(gone))
        except NoEmbedding as failed:
            why = failed
        else:
            encoder.answered()
            self._metrics.inc("saccade_encoder_bytes_total", self.tower.nbytes(given.num_tokens))
            return EncoderOutcome("embedding", (time.monotonic() - begun) * 1e3, given.encode_ms)
        if why.lasting:
            encoder.failed(why)
        return EncoderOutcome(why.kind, (time.monotonic() - begun) * 1e3)

    async def _look(self, path: Path) -> None:
        """Update the list of encoders from the file. After an error, the previous list remains in
        use.
        """
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                listed = await asyncio.to_thread(_listed, path)
            if set(listed) != set(self._encoders):
                self._name(listed)
                log.info("encoders: %s", ", ".join(listed) or "none, by their file")
            self._wrong = ""
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if str(error) != self._wrong:  # log once, not every second
                self._wrong = str(error)
                log.warning("--encoders: %s", error)

    def _name(self, urls: Sequence[str]) -> None:
        before = self._encoders
        every = [before.get(url) or _Encoder(url) for url in urls]
        self._encoders = {each.name: each for each in every}
        for name in before.keys() - self._encoders.keys():
            before[name].upstream.drop()

    async def _exchange(
        self, encoder: _Encoder, wanted: EmbeddingRequest, data: bytes, slot: PixelSlot
    ) -> EmbeddingResult:
        """Request an embedding from one encoder. If `data` is large, request the embedding by key
        first.

        Raises NoEmbedding, WorkerDisconnected.
        """
        if len(data) > SEND_CHUNK_BYTES or not data:
            given = await self._post(encoder, wanted, b"", slot)
            if given is not None:
                return given
        if data and (given := await self._post(encoder, wanted, data, slot)) is not None:
            return given
        raise NoEmbedding("refused", "it does not have the image of this hash", False)

    async def _post(
        self, encoder: _Encoder, wanted: EmbeddingRequest, data: bytes, slot: PixelSlot
    ) -> EmbeddingResult | None:
        """Send one request. Returns `None` if the encoder does not have the image's bytes."""
        head = [
            f"POST {ENCODE_PATH} HTTP/1.1",
            f"host: {encoder.authority}",
            "content-type: application/octet-stream",
            f"content-length: {len(data)}",
            f"{REQUEST_HEADER}: {msgspec.json.encode(wanted).decode()}",
        ]
        if key := self._settings.key:
            head.append(f"authorization: Bearer {key}")
        request = "\r\n".join((*head, "", "")).encode("latin-1")
        async with encoder.upstream.exchange(b"POST", request, data) as (answer, pieces):
            if answer.status != 200:
                if answer.status == 404 and not data:
                    return None
                raise _refusal(answer.status, await _said(pieces))
            given = self._check_head(answer, wanted)
            await self._receive(given, pieces, slot)
            return given

    def _check_head(self, answer: Head, wanted: EmbeddingRequest) -> EmbeddingResult:
        """Return the embedding's description from the response headers.

        Raises NoEmbedding if it differs from the requested embedding.
        """
        headers = dict(answer.headers)
        try:
            given = json_decoder(EmbeddingResult).decode(headers[RESULT_HEADER.encode()])
        except (KeyError, msgspec.MsgspecError) as error:
            raise NoEmbedding("damaged", f"invalid response: {error!r}") from None
        answered = given.tower, given.num_tokens
        if answered != (wanted.tower, wanted.image.num_tokens):
            raise NoEmbedding("damaged", f"it requested a different embedding than {answered}")
        return given

    async def _receive(
        self, given: EmbeddingResult, pieces: AsyncIterator[bytes], slot: PixelSlot
    ) -> None:
        """Read the response body into the slot and check the values.

        Raises NoEmbedding, WorkerDisconnected.
        """
        nbytes, came = given.tower.nbytes(given.num_tokens), 0
        target = self._arena.flat(slot.offset, nbytes)
        async for piece in pieces:
            if came + len(piece) > nbytes:
                raise NoEmbedding(
                    "damaged", (f"its response is longer than the embedding ({nbytes} bytes)")
                )
            target[came : came + len(piece)] = piece
            came += len(piece)
        if came != nbytes:
            raise NoEmbedding(
                "damaged", (f"its response has {came} bytes; the embedding has {nbytes}")
            )
        if error := await asyncio.to_thread(_fault, target, given):
            raise NoEmbedding("damaged", error)


def build_encoders(options: ServeOptions, arena: Arena, metrics: Metrics) -> Encoders:
    """Create the client of the encoders that these options list. Raises ConfigError."""
    return Encoders(
        options.of(RoleSettings), arena, metrics, options.of(FetchSettings).fetch_timeout
    )


def question(opened: OpenedImage, tower: Tower) -> tuple[EmbeddingRequest, bytes]:
    """Return the request for an image's embedding, and its body. The body is empty if the image's
    bytes are no longer in memory.
    """
    files = [frame.encoded.data for frame in opened.frames] if opened.there else []
    budget = opened.budget
    assert budget is not None, "frames of a file are encoded where their text is"
    if isinstance(budget, FrameBudget):
        sizes = tuple(map(len, files))
        return EmbeddingRequest(opened.image, tower, frames=budget, nbytes=sizes), b"".join(files)
    wishes = budget.detail, budget.min_pixels, budget.max_pixels
    return EmbeddingRequest(opened.image, tower, *wishes), b"".join(files)


def _listed(path: Path) -> list[str]:
    """Read the encoders' URLs from a file. Raises OSError, UnicodeDecodeError, ConfigError."""
    with open(path, opener=regular) as file:
        lines = file.read(MAX_LISTED).split()
    return [parse_worker(line, "--encoders")[0] for line in lines]


_EXPONENTS = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""The exponent bits of each dtype. All of them are set in NaN and infinity."""
_CHECKED_BYTES = 1 << 20
"""Number of bytes that are checked at a time, to bound temporary memory."""


def _fault(values: memoryview, given: EmbeddingResult) -> str:
    """Return what is wrong with an embedding's values, or "" if they are valid."""
    if blake3(values).hexdigest() != given.blake3:
        return "the checksum of an embedding is wrong"
    bits = _EXPONENTS[given.tower.dtype]
    wide = given.tower.dtype == "float32"
    numbers: np.ndarray = np.frombuffer(values, np.uint32 if wide else np.uint16)
    for start in range(0, len(numbers), _CHECKED_BYTES // numbers.itemsize):
        part = numbers[start : start + _CHECKED_BYTES // numbers.itemsize]
        if ((part & bits) == bits).any():
            return "an embedding contains NaN or infinity"
    return ""


async def _said(pieces: AsyncIterator[bytes]) -> str:
    body = b""
    async for piece in pieces:
        body = (body + piece)[:MAX_ERROR_BYTES]
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return body.decode("latin-1")[:200]


def _refusal(status: int, said: str) -> NoEmbedding:
    """Convert an error response to NoEmbedding.

    If the error concerns this image (unreadable or too large) or the encoder's load, it is not
    lasting.
    """
    lasting = status not in (400, 404, 413, 429)
    return NoEmbedding("refused", f"it returned {status}: {said}", lasting)
