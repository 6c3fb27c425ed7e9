"""Reads documents in separate image workers, which malicious files may crash: the sizes of pages,
their text, and their pixels.

A job is one page, so that clients are served round-robin page by page. Sizes are fast to read, and
have separate workers. CPU time is limited per page and per document. A file that exceeds it, or
crashes a worker, is rejected for a while. The workers start with the first document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import TypeVar

import msgspec

from saccade.core.config import MIB
from saccade.core.decoders import msgpack_decoder
from saccade.core.errors import EngineUnavailable, ImageError
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.media.sources.fairness import Requester, Turns
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.header_pool import RefusedBytes, fail
from saccade.media.workers.orders import (
    SIZE_BYTES,
    SIZES_HEAD_BYTES,
    DocumentPiece,
    PageWanted,
    ReadDocument,
    piece_bytes,
)
from saccade.media.workers.worker_slots import (
    NO_TIME,
    SLACK_BYTES,
    TRIES,
    WorkerLost,
    WorkerSlot,
    WorkerSlots,
)

PAGE_BYTES = 512 * MIB
"""Memory for drawing a page, in addition to the file. It suffices for a color scan of 100 Mpx."""
OUTBOX_BYTES = 256 * MIB
"""Maximum bytes of the result for one page."""
MAX_FILE_PAGES = 10_000
"""Maximum pages of a file. Decoding the sizes of so many pages takes 3 ms on the event loop."""
PAGE_SHARE, DOCUMENT_SHARE = 0.25, 3.0
"""The maximum CPU time of a page, and of a document, as a fraction of `decode_timeout`."""
PATIENCE = 2.0
"""The maximum wait for a page's CPU time on a busy machine, as a multiple of `decode_timeout`."""

T = TypeVar("T")
LOST = "the PDF cannot be read: its reader crashed, or needed too much memory"
_SIZES = msgpack_decoder(list[tuple[float, float]])
_PAGE = msgpack_decoder(tuple[str, bytes])


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBytes:
    """The bytes of a file, and the client that sent it."""

    digest: bytes
    data: bytes
    requester: Requester = field(default_factory=Requester)


@dataclass(slots=True, eq=False)
class _Budget:
    """The CPU time that remains for a document."""

    seconds: float  # in total
    pages: int  # the number of pages that share it
    use: str  # the content that is rejected once it has been used up
    left: float = field(init=False)  # the remaining seconds

    def __post_init__(self) -> None:
        self.left = self.seconds


@dataclass(slots=True, eq=False)
class _Work:
    """A job: one page of a file, or the sizes of all pages if `page` is None.

    tries: the number of workers that have crashed on it.
    """

    file: DocumentBytes
    page: PageWanted | None
    budget: _Budget
    done: asyncio.Future[bytes] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    tries: int = 0

    @property
    def requester(self) -> Requester:
        return self.file.requester

    @property
    def wanted(self) -> bool:
        return not self.done.done()

    @property
    def draws(self) -> bool:
        return self.page is not None and self.page.drawing is not None

    @property
    def use(self) -> str:
        """The key under which this use of the file is rejected after a failure.

        A page that is too slow to draw does not prevent its text and other pages from being read. A
        region that is too slow does not prevent the whole page from being drawn.
        """
        if self.page is None:
            return "sizes"
        if self.page.drawing is not None and self.page.drawing.box is not None:
            return f"part of {self.page.index}"
        return f"{'image' if self.draws else 'text'} {self.page.index}"


class DocumentPool:
    """All image workers of a server that read documents."""

    def __init__(
        self,
        options: MediaOptions,
        max_pages: int,
        metrics: Metrics,
        fork_servers: ForkServers | None = None,
    ) -> None:
        """Create slots for the workers, without starting a process.

        fork_servers: shared with other pools, and closed by the caller. If None, the pool creates
            and closes its own fork servers.
        """
        self._own_fork_servers = ForkServers() if fork_servers is None else None
        fork_servers = fork_servers or self._own_fork_servers
        assert fork_servers is not None
        self._options = options
        self._metrics = metrics
        self._refused = RefusedBytes()
        self._max_pages = most = max(MAX_FILE_PAGES, max_pages)
        room = SIZES_HEAD_BYTES + SIZE_BYTES * most
        self._measuring = _Readers(fork_servers, options, metrics, self._refused, 1, room, most)
        self._reading = _Readers(
            fork_servers, options, metrics, self._refused, options.workers, OUTBOX_BYTES, most
        )

    async def close(self) -> None:
        """Stop the workers, and cancel all queued jobs."""
        await asyncio.gather(self._measuring.close(), self._reading.close())
        if self._own_fork_servers is not None:
            await asyncio.to_thread(self._own_fork_servers.close)

    async def sizes(self, file: DocumentBytes) -> list[tuple[float, float]]:
        """Return (height, width) of each page in points. Raises ImageError, EngineUnavailable."""
        seconds = PAGE_SHARE * self._options.decode_timeout
        budget = _Budget(seconds, self._max_pages, "sizes")
        (piece,) = await self._measuring.do([_Work(file, None, budget)])
        sizes = _read(_SIZES, piece)
        if not 1 <= len(sizes) <= self._max_pages or not all(
            0 < side < 1e9 for size in sizes for side in size
        ):
            raise ImageError(LOST, code="invalid_document")
        return sizes

    async def pages(
        self,
        file: DocumentBytes,
        wanted: Sequence[PageWanted],
        grow: Callable[[int], None] = lambda _: None,
    ) -> list[tuple[str, bytes]]:
        """Return the text and the PNG of each of these pages.

        grow: called with the total bytes of results so far.

        Raises ImageError for a malformed or too large document, EngineUnavailable, and any
        exception of `grow`.
        """
        for page in wanted:
            if page.drawing is not None and piece_bytes(page) > OUTBOX_BYTES:
                raise ImageError(
                    f"page {page.index + 1} of the PDF would have {page.drawing.kept} px: set a "
                    "smaller max_pixels",
                    code="image_too_large",
                )
        use = f"{wanted[0]} to {wanted[-1]}, {len(wanted)} pages"
        budget = _Budget(DOCUMENT_SHARE * self._options.decode_timeout, len(wanted), use)
        works = [_Work(file, page, budget) for page in wanted]
        return [_read(_PAGE, piece) for piece in await self._reading.do(works, grow)]


class _Readers:
    """One group of workers that read documents, and the jobs queued for them."""

    def __init__(
        self,
        fork_servers: ForkServers,
        options: MediaOptions,
        metrics: Metrics,
        refused: RefusedBytes,
        workers: int,
        outbox: int,
        max_pages: int,
    ) -> None:
        """Create slots for the workers, without starting a process.

        refused: records the files that must not be tried again.
        workers: the number of workers, in addition to a reserved one.
        outbox: the maximum bytes of a result.
        max_pages: the maximum number of pages of a document.
        """
        memory = PAGE_BYTES + 3 * options.max_image_bytes + SLACK_BYTES
        self._slots = WorkerSlots(
            fork_servers.readers,
            None,
            workers,
            memory,
            metrics,
            self._dispatch,
            self._fail,
            outbox,
        )
        self._options = options
        self._max_pages = max_pages
        self._metrics = metrics
        self._refused = refused
        self._turns: Turns[_Work] = Turns()
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop the workers, and cancel all queued jobs."""
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._slots.close()
        for work in self._turns:
            work.done.cancel()

    async def do(
        self, works: Sequence[_Work], grow: Callable[[int], None] = lambda _: None
    ) -> list[bytes]:
        """Run the jobs of one file, and return their results in order.

        grow: called with the total bytes of results so far.

        Raises ImageError, EngineUnavailable, and any exception of `grow`.
        """
        self._slots.start()
        requester, file = works[0].requester, works[0].file
        for use in (works[0].budget.use, *(work.use for work in works)):
            self._refused.check(requester.tenant, file.digest, use)
        for work in works:
            self._turns.add(work)
        self._dispatch()
        pieces: list[bytes] = []
        nbytes = 0
        try:
            for work in works:
                pieces.append(await work.done)
                nbytes += len(pieces[-1])
                grow(nbytes)
        finally:  # the first failure cancels the other jobs
            for work in works:
                if not work.done.cancel() and not work.done.cancelled():
                    work.done.exception()  # mark it as retrieved
        return pieces

    def _dispatch(self) -> None:
        while self._slots.idle() and (work := self._turns.take_next(self._has_worker)):
            slot = self._slots.idle(work.requester.tenant)
            assert slot is not None
            slot.client = work.requester.client
            task = asyncio.create_task(self._run(slot, work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _has_worker(self, work: _Work) -> bool:
        return self._slots.has_worker(work.requester.client)

    def _fail(self, why: str) -> None:
        while work := self._turns.take_next():
            fail(work.done, EngineUnavailable(why))

    # ---- one job

    async def _run(self, slot: WorkerSlot, work: _Work) -> None:
        try:
            found = await self._read(slot, work)
            if work.wanted:
                work.done.set_result(found)
        except (ImageError, EngineUnavailable) as error:
            fail(work.done, error)
        except TimeoutError:
            work.budget.left -= await self._slots.kill(slot)
            self._again(work, EngineUnavailable(NO_TIME))
        except WorkerLost as lost:
            work.budget.left -= lost.cpu
            if lost.late:
                use = work.use if work.budget.left > 0 else work.budget.use
                self._refuse(work, self._late(work), use)
            elif self._again(work, crash := ImageError(LOST, code="invalid_document")) and (
                lost.signal != SIGKILL
            ):
                self._refuse(work, crash, work.use)
        finally:
            slot.free()
        self._dispatch()

    async def _read(self, slot: WorkerSlot, work: _Work) -> bytes:
        """Run one job, and return its result. Raises ImageError, TimeoutError and WorkerLost."""
        data = work.file.data
        await self._slots.prepare(slot, [data], work.requester.tenant, work.file.digest)
        order = ReadDocument(
            slot.number,
            slot.serial,
            len(data),
            self._max_pages,
            () if work.page is None else (work.page,),
            PAGE_BYTES + 2 * len(data),
            max(0.0, min(self._page_seconds, work.budget.left)),
        )
        self._slots.send(slot, order)
        async with asyncio.timeout(PATIENCE * self._options.decode_timeout):
            answer = await slot.answer()
        assert isinstance(answer, DocumentPiece)
        work.budget.left -= answer.cpu
        if answer.reason is not None:
            raise ImageError(answer.reason.text, code=answer.reason.code)
        if work.draws:
            self._metrics.inc("saccade_pages_rendered_total")
        return await slot.answered(order.answer_at, answer.nbytes)

    @property
    def _page_seconds(self) -> float:
        return PAGE_SHARE * self._options.decode_timeout

    def _late(self, work: _Work) -> ImageError:
        page, budget = work.page, work.budget
        if page is None:
            what, seconds = "opening the PDF takes", budget.seconds
        elif budget.left > 0:
            what, seconds = f"page {page.index + 1} of the PDF takes", self._page_seconds
        else:
            what = f"the PDF's first {page.index + 1} of {budget.pages} pages take"
            seconds = budget.seconds
        part = page is not None and page.drawing is not None and page.drawing.box is not None
        less = "use a smaller max_pixels" if part else "send pages that are simpler, or fewer"
        return ImageError(
            f"{what} more than {seconds:g} s of CPU time: {less}, or start the server with a "
            "larger --tune decode_timeout=SECONDS",
            code="document_too_large",
        )

    def _refuse(self, work: _Work, error: ImageError, use: str) -> None:
        """Fail a job, and reject the use `use` of this file for a while."""
        self._refused.add(work.requester.tenant, work.file.digest, error, use)
        fail(work.done, error)

    def _again(self, work: _Work, error: Exception) -> bool:
        """Queue a job again after its worker has crashed. After the last try, fail the job with
        `error` and return True.
        """
        work.tries += 1
        if work.tries >= TRIES:
            fail(work.done, error)
            return True
        self._turns.put_back(work)
        return False


def _read(decoder: msgspec.msgpack.Decoder[T], piece: bytes) -> T:
    """Decode a worker's result, which may be malicious. Raises ImageError."""
    try:
        return decoder.decode(piece)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ImageError(LOST, code="invalid_document") from None
