"""Embeddings from servers that only encode (`--encoders`), instead of decoding and encoding here.

Owns the question to encoders: the choice between them, the time limit, and the check on the answer.
After any failure, counted by kind, this server encodes the image itself.

One encoder has the word on one image (rendezvous hashing by its digest). So all asking servers, at
any time, find the embedding ready. An encoder that failed is left alone for a while, and its images
go to the next.
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
"""Bytes of an encoded image that go with the first question; more only if the encoder lacks it."""
MAX_CONCURRENT_REQUESTS = 16
"""Images, of one encoder; more wait, within `fetch_timeout`."""
AWAY_SECONDS = 1.0
MAX_AWAY_SECONDS = 60.0
"""An encoder that fails is not asked for so long, twice as long after each failure that follows."""
CHECK_SECONDS = 1.0
"""--encoders is read at most so often."""
CHECK_TIMEOUT = 1.0
"""Seconds that an image waits for that; who encodes then stays as it was."""
MAX_LISTED = 1 << 16
"""Characters of that file that are read."""
MAX_ERROR_BYTES = 2000
"""Bytes of a refusal that are read."""


class NoEmbedding(Exception):
    """Report a missing embedding. `kind` is as in `saccade_encoder_images_total`. `lasting` means
    that other images will fail too.
    """

    def __init__(self, kind: str, why: str, lasting: bool = True) -> None:
        super().__init__(why)
        self.kind = kind
        self.lasting = lasting


class _Encoder:
    """One encoder. It is asked again after `away_until`. `away` has the last pause's seconds."""

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
            return  # one of those who asked at the same time
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
    """All encoders. `trust` takes our own tower's signature, once known. Encoders are asked only
    after that.
    """

    def __init__(
        self, settings: RoleSettings, arena: Arena, metrics: Metrics, seconds: float = 10.0
    ) -> None:
        """Name the encoders from the settings. `seconds`: for an embedding. Raises ConfigError."""
        self._settings = settings
        self._seconds = seconds
        self._arena = arena
        self._metrics = metrics
        self._encoders: dict[str, _Encoder] = {}
        self._name(settings.urls)
        self._look_at = 0.0  # into the file
        self._looking = asyncio.Lock()
        self._wrong = ""  # with the file, at the last look
        self.tower = Tower()
        self._tasks: dict[ImageKey, asyncio.Task[EncoderOutcome]] = {}

    def trust(self, tower: Tower) -> None:
        """Take only embeddings made by this tower."""
        self.tower = tower

    async def encode_image(self, opened: OpenedImage, slot: PixelSlot) -> EncoderOutcome:
        """Have a held image's embedding written into `slot`, as `encode` does."""
        return await self.encode(*question(opened, self.tower), slot)

    async def encode(
        self, wanted: EmbeddingRequest, data: bytes, slot: PixelSlot
    ) -> EncoderOutcome:
        """Have an embedding written into `slot`. Writes to the slot end with the call.

        `data` is the encoded image, empty where only the key is known. Raises CancelledError after
        `call_off`.
        """
        key = wanted.image.key
        assert key not in self._tasks, "the engine asks for an image once at a time"
        task = asyncio.create_task(self._ask(wanted, data, slot))
        self._tasks[key] = task
        try:
            answer = await task
        finally:
            del self._tasks[key]
        self._metrics.inc("saccade_encoder_images_total", outcome=answer.outcome)
        return answer

    def call_off(self, key: ImageKey) -> None:
        """Cancel the question for an image."""
        if key in self._tasks:
            self._tasks[key].cancel()

    async def close(self) -> None:
        """End every question and every connection."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for encoder in self._encoders.values():
            encoder.upstream.drop()

    def fits(self, num_tokens: int, slot: PixelSlot) -> bool:
        """Return True if an embedding may be asked for and fits the slot."""
        return 0 < self.tower.nbytes(num_tokens) <= slot.embedding_bytes

    async def _ask(self, wanted: EmbeddingRequest, data: bytes, slot: PixelSlot) -> EncoderOutcome:
        begun = time.monotonic()
        if (file := self._settings.file) is not None:
            async with self._looking:  # concurrent callers wait for the same read
                if begun >= self._look_at:
                    await self._look(file)
                    self._look_at = time.monotonic() + CHECK_SECONDS
        here = [name for name, each in self._encoders.items() if begun >= each.away_until]
        if not here:
            return EncoderOutcome("away")
        # Without loads: what one encoder has, no other has, however busy it is.
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
        """Read the encoders from the file. After an error the list stays as before."""
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
        """Ask these encoders from now on. Raises ConfigError."""
        before = self._encoders
        every = [before.get(url) or _Encoder(url) for url in urls]
        self._encoders = {each.name: each for each in every}
        for name in before.keys() - self._encoders.keys():
            before[name].upstream.drop()

    async def _exchange(
        self, encoder: _Encoder, wanted: EmbeddingRequest, data: bytes, slot: PixelSlot
    ) -> EmbeddingResult:
        """Ask an encoder for an embedding, by the key alone first if the data is large.

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
        """Send one question. Returns `None` if the encoder lacks the bytes."""
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
        """Raise NoEmbedding unless the answer announces the right embedding."""
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
        """Receive the values into the slot and check them. Raises NoEmbedding,
        WorkerDisconnected.
        """
        nbytes, came = given.tower.nbytes(given.num_tokens), 0
        target = self._arena.flat(slot.offset, nbytes)
        async for piece in pieces:
            if came + len(piece) > nbytes:
                raise NoEmbedding("damaged", f"an embedding of {nbytes} bytes goes on after them")
            target[came : came + len(piece)] = piece
            came += len(piece)
        if came != nbytes:
            raise NoEmbedding("damaged", f"an embedding of {nbytes} bytes ends after {came}")
        if error := await asyncio.to_thread(_fault, target, given):
            raise NoEmbedding("damaged", error)


def build_encoders(options: ServeOptions, arena: Arena, metrics: Metrics) -> Encoders:
    """Build the encoders that these options name. Raises ConfigError."""
    return Encoders(
        options.of(RoleSettings), arena, metrics, options.of(FetchSettings).fetch_timeout
    )


def question(opened: OpenedImage, tower: Tower) -> tuple[EmbeddingRequest, bytes]:
    """Return the question for an image's embedding, and its body. The body is empty if the bytes
    are gone.
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
    """Return the encoders' names. Raises OSError, UnicodeDecodeError, ConfigError."""
    with open(path, opener=regular) as file:
        lines = file.read(MAX_LISTED).split()
    return [parse_worker(line, "--encoders")[0] for line in lines]


_EXPONENTS = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits that are all set in what is no number."""
_CHECKED_BYTES = 1 << 20
"""Values checked at a time."""


def _fault(values: memoryview, given: EmbeddingResult) -> str:
    """Describe the fault in an embedding's values, or return ""."""
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
    """Convert an error response. An image that is unreadable or too large for an encoder
    says nothing about other images.
    """
    lasting = status not in (400, 404, 413, 429)
    return NoEmbedding("refused", f"it returned {status}: {said}", lasting)
