"""Runs batches. Each line is sent to the server's own routes, like any other request.

At most `ABREAST` lines and requests of clients are in flight together, so that batches use idle
time. The runner also checks input files, and writes result files. It is one task on the event loop,
with separate threads for disk and databases.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Scope

from saccade.api.stored_objects import Paging
from saccade.core.client import SHARE, Client, Permits
from saccade.core.config import MIB
from saccade.core.decoders import json_decoder
from saccade.core.errors import InvalidRequest, RequestError, TooLarge
from saccade.core.metrics import Metrics
from saccade.edge.headers import CLIENT, request_id
from saccade.edge.refusal import refusal
from saccade.plugins.batches.fields import (
    DAY,
    BatchError,
    BatchErrors,
    BatchJob,
    BatchLine,
    BatchRequest,
    Status,
)
from saccade.plugins.batches.store import BatchStore, BufferedBatch, InputLine, new_id, now
from saccade.plugins.batches.threads import StoreThreads
from saccade.plugins.files.uploads import Uploads

log = logging.getLogger("saccade")

OUTPUT = "batch_output"
ABREAST = 8
"""Maximum lines in flight, including requests of clients."""
PAUSE = 0.05
LOOK = 2.0
"""Seconds between two checks whether lines may start, and whether there are batches."""
MAX_RUNNING = 8
"""Maximum batches that run concurrently. Each is from a different client."""
MAX_LINES = 1_000_000
MAX_ERRORS = 20
"""Maximum number of errors that are reported for an input file."""
TOGETHER = 2_000
"""Number of lines that are stored per transaction."""
BUSY = 429
REFUSED_FOR_NOW = frozenset((BUSY, 503))

_LINE: msgspec.json.Decoder[BatchLine] = json_decoder(BatchLine)


T = TypeVar("T")


class _Streamed(msgspec.Struct):
    stream: Any = None


_STREAMED = json_decoder(_Streamed)


STREAMED = InvalidRequest(
    "stream: answers of batches are not streamed: omit it", "stream", "unsupported_parameter"
)


class BatchRunner:
    """Runs batches in the background.

    app: the application to which each line is sent like a request from a client.
    models: the names of the served model. Batches of other models are left to other servers, which
    may use the same directory.
    largest: the maximum bytes of a line.

    The results of a batch may be as large as all uploaded files together.
    """

    def __init__(
        self,
        app: ASGIApp,
        store: BatchStore,
        files: Uploads,
        permits: Permits,
        metrics: Metrics,
        models: Sequence[str],
        largest: int,
    ) -> None:
        self._app = app
        self._store = store
        self._files = files
        self._permits = permits
        self._metrics = metrics
        self._models = models
        self._largest = largest
        self._threads = StoreThreads()
        self._own_threads = ThreadPoolExecutor(MAX_RUNNING, "saccade-batch")
        self._asked = asyncio.Event()
        self._mine = 0
        self._task: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        """The running batches by client name. Each client has at most one."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop all batches. When a batch is resumed, the lines that were in progress are
        run again.
        """
        tasks = [*self._running.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._own_threads.shutdown(wait=False, cancel_futures=True)
        self._threads.close()

    async def add_batch(self, request: BatchRequest, client: Client) -> BatchJob:
        """Create a batch from an uploaded file of the client.

        Raises NotFound, Overloaded, StorageBusy.
        """
        await self._files.find(request.input_file_id, client.name)
        made = now()
        batch = BatchJob(
            id=new_id(),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            created_at=made,
            expires_at=made + DAY,
            model=self._models[0],
            metadata=request.metadata,
        )
        after = request.output_expires_after
        lifetime = None if after is None else after.seconds
        await self._threads.run(client, partial(self._store.add_batch, batch, client, lifetime))
        self._asked.set()
        return batch

    async def find_batch(self, id: str, client: Client) -> BatchJob:
        return await self._threads.run(client, partial(self._store.find_batch, id, client.name))

    async def page(self, client: Client, paging: Paging) -> list[BatchJob]:
        """Return a page of the client's batches."""
        return await self._threads.run(client, partial(self._store.page, client.name, paging))

    async def cancel(self, id: str, client: Client) -> BatchJob:
        return await self._threads.run(client, partial(self._store.cancel, id, client.name))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._own_threads, work)

    # ---- batches

    async def _run(self) -> None:
        while True:
            self._asked.clear()
            self._running = {
                owner: task for owner, task in self._running.items() if not task.done()
            }
            find = partial(self._store.open_batches, self._models)
            for id, owner in await self._off_loop(find):
                if owner not in self._running and len(self._running) < MAX_RUNNING:
                    self._running[owner] = asyncio.create_task(self._run_one(id))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), LOOK)

    async def _run_one(self, id: str) -> None:
        try:
            with self._store.hold_batch(id) as held:
                if held is not None:
                    await self._carry_out(held)
        except Exception:  # other batches continue, and this one is retried
            log.exception("%s: cannot be run now", id)
            await asyncio.sleep(LOOK)
        finally:
            self._asked.set()

    async def _carry_out(self, held: BufferedBatch) -> None:
        batch, client = held.batch, held.client
        try:
            input = await self._files.open(batch.input_file_id, client.name)
        except RequestError as error:
            await self._end(held, "failed", [BatchError("input_file", str(error))])
            return
        with input:
            if batch.status == "validating":
                faults = await self._off_loop(partial(self._check, held, input))
                if faults:
                    await self._end(held, "failed", faults)
                    return
                await self._set(held, "in_progress")
            over: Status = "cancelled" if held.is_cancelled() else "completed"
            try:
                if batch.status == "in_progress":
                    over = await self._answer_lines(held, input)
                    await self._set(held, "finalizing")
            except TooLarge as error:
                await self._end(held, "failed", [BatchError("output_file", str(error))])
                return
        try:
            batch.output_file_id = await self._save(held, answered=True)
            batch.error_file_id = await self._save(held, answered=False)
        except RequestError as error:  # there is no space for the results
            await self._end(held, "failed", [BatchError("output_file", str(error))])
            return
        await self._end(held, over)

    async def _set(self, held: BufferedBatch, status: Status) -> None:
        held.batch.status = status
        held.batch.moments.setdefault(status, now())
        await self._off_loop(held.write)

    async def _end(
        self, held: BufferedBatch, status: Status, faults: Sequence[BatchError] = ()
    ) -> None:
        if faults:
            held.batch.errors = BatchErrors(list(faults))
        await self._set(held, status)
        await self._off_loop(held.drop_lines)

    # ---- the input

    def _check(self, held: BufferedBatch, input: BinaryIO) -> list[BatchError]:
        """Check all lines, and store their positions in the input file. Returns the errors that
        were found.
        """
        held.clear_lines()
        faults: list[BatchError] = []
        lines: list[InputLine] = []
        for number, start, data in _lines(input, self._largest):
            fault, id = _read(number, data, held.batch.endpoint, self._largest)
            if fault is not None:
                faults.append(fault)
            elif number > MAX_LINES:
                faults.append(
                    BatchError("too_many_lines", f"the file has more than {MAX_LINES} lines")
                )
                break
            else:
                lines.append(InputLine(number, id, start, len(data)))
            if len(lines) >= TOGETHER:
                faults += _keep(held, lines)
                lines = []
            if len(faults) >= MAX_ERRORS:
                break
        faults += _keep(held, lines)
        if not (faults or held.open_lines(0, 1)):
            faults.append(
                BatchError("empty_file", "the file has no lines: write one request per line")
            )
        return faults[:MAX_ERRORS]

    # ---- lines

    async def _answer_lines(self, held: BufferedBatch, input: BinaryIO) -> Status:
        """Run all lines that have no result. Returns the batch's final status."""
        under_way: set[asyncio.Task[None]] = set()
        waiting: list[InputLine] = []
        last = 0
        over: Status = "completed"
        try:
            while True:
                for task in [task for task in under_way if task.done()]:
                    under_way.remove(task)
                    task.result()  # raise any exception, rather than skip a line
                if await self._off_loop(held.is_cancelled):
                    over = "cancelled"
                    break
                if held.result_bytes > self._files.budget:
                    raise TooLarge(
                        f"the results have over {self._files.budget / MIB:.0f} MiB, the limit "
                        "(--files-dir)"
                    )
                if time.time() > held.batch.expires_at:
                    over = "expired"
                    break
                if not waiting:
                    waiting = await self._off_loop(partial(held.open_lines, last, TOGETHER))
                    if not waiting and not under_way:
                        break
                    last = waiting[-1].number if waiting else last
                while waiting and self._may_begin():
                    self._mine += 1
                    under_way.add(asyncio.create_task(self._line(held, input, waiting.pop(0))))
                if under_way:
                    await asyncio.wait(
                        under_way, timeout=PAUSE, return_when=asyncio.FIRST_COMPLETED
                    )
                else:
                    await asyncio.sleep(PAUSE)
            await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        return over

    def _may_begin(self) -> bool:
        """Return True if another line may be started. Requests of waiting clients take
        precedence.
        """
        others = self._permits.taken - self._mine
        return self._mine < max(0, ABREAST - max(0, others))

    async def _line(self, held: BufferedBatch, input: BinaryIO, line: InputLine) -> None:
        try:
            body = await self._off_loop(partial(_body, input, line))
            while True:
                status, request, answer = await self._ask(held, body)
                if status not in REFUSED_FOR_NOW:
                    break
                await asyncio.sleep(LOOK)
            good = status < 400
            result = _result(line.custom_id, status, request, answer)
            await self._off_loop(partial(held.answer, line.number, good, result))
            self._metrics.inc("saccade_batch_lines_total", outcome="answer" if good else "error")
        finally:
            self._mine -= 1

    async def _ask(self, held: BufferedBatch, body: bytes) -> tuple[int, str, bytes]:
        """Send one line to the app. Returns the response's status, the ID of the request, and the
        response's body.
        """
        name = f"batch_req_{secrets.token_hex(16)}"
        if _is_streamed(body):
            status, _, answer = refusal(held.batch.endpoint, STREAMED, name)
            return status, name, answer
        request_id.set(name)
        status, pieces = 500, []
        sent, gone = False, asyncio.Event()

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await gone.wait()  # there is no client that could disconnect
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                pieces.append(message.get("body", b""))

        with suppress(Exception):  # the app has logged it, and responded with 500
            await self._app(_scope(held, body), receive, send)
        return status, name, b"".join(pieces)

    # ---- results

    async def _save(self, held: BufferedBatch, *, answered: bool) -> str | None:
        """Save all answers, or all errors, as a file, and return its ID, which is the same in each
        run. Returns None if there are none.
        """
        batch, client = held.batch, held.client
        with tempfile.TemporaryFile(dir=self._store.folder) as made:
            if not await self._off_loop(partial(_write_results, held, made, answered)):
                return None
            suffix = batch.id[-7:] + ("0" if answered else "1")
            name = f"{batch.id}_{'output' if answered else 'error'}.jsonl"
            with mmap.mmap(made.fileno(), 0, access=mmap.ACCESS_READ) as data:
                share = SHARE if client.limited else 1.0
                stored = await self._files.save(
                    data, name, OUTPUT, held.lifetime, client.name, share, suffix
                )
        return stored.id


def _scope(held: BufferedBatch, body: bytes) -> Scope:
    path = held.batch.endpoint
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        CLIENT: replace(held.client, address=f"batch of {held.client.address}"),
    }


def _lines(input: BinaryIO, largest: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, offset and content of each non-empty line. Lines longer than `largest` are
    truncated.
    """
    number, start = 0, 0
    input.seek(0)
    while data := input.readline(largest + 2):
        number += 1
        if data.strip():
            yield number, start, data.rstrip(b"\r\n")
        start += len(data)


def _read(number: int, data: bytes, endpoint: str, largest: int) -> tuple[BatchError | None, str]:
    if len(data) > largest:
        return BatchError("line_too_long", f"the line has more than {largest} bytes", number), ""
    try:
        line = _LINE.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return BatchError("invalid_json_line", str(error)[:300], number), ""
    if line.url != endpoint:
        wrong = f"url is {line.url[:100]!r}; this batch is of {endpoint}"
        return BatchError("mismatched_url", wrong, number, "url"), ""
    return None, line.custom_id


def _keep(held: BufferedBatch, lines: Sequence[InputLine]) -> list[BatchError]:
    try:
        held.add_lines(lines)
    except sqlite3.IntegrityError:
        return [_double(held, lines)]
    return []


def _double(held: BufferedBatch, lines: Sequence[InputLine]) -> BatchError:
    for line in lines:
        try:
            held.add_lines([line])
        except sqlite3.IntegrityError:
            wrong = f"custom_id {line.custom_id[:100]!r} is a duplicate of an earlier line"
            return BatchError("duplicate_custom_id", wrong, line.number, "custom_id")
    raise AssertionError("a request was rejected")


def _body(input: BinaryIO, line: InputLine) -> bytes:
    """Read the body in a line. Call this in a thread, because the event loop's stack allows less
    nesting of JSON.
    """
    return bytes(_LINE.decode(os.pread(input.fileno(), line.length, line.start)).body)


def _is_streamed(body: bytes) -> bool:
    try:
        return _STREAMED.decode(body).stream is True
    except (msgspec.MsgspecError, RecursionError):
        return False  # the endpoint reports the error


def _result(custom_id: str, status: int, request: str, answer: bytes) -> bytes:
    response = {
        "status_code": status,
        "request_id": request,
        "body": msgspec.Raw(answer or b"null"),
    }
    return msgspec.json.encode(
        {"id": request, "custom_id": custom_id, "response": response, "error": None}
    )


def _write_results(held: BufferedBatch, made: BinaryIO, answered: bool) -> int:
    count = 0
    for result in held.results(answered):
        made.write(result + b"\n")
        count += 1
    made.flush()
    return count
