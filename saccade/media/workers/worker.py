"""Runs an image worker, a process that reads headers, decodes images or reads documents, one order
at a time. Hostile bytes may crash it or take control of it.

`media/workers/supervisor.py` forks workers. Before its first order, a worker is sandboxed
(`sandbox.py`). It then has only a socket to the supervisor, a read-only inbox with the encoded
bytes, and an outbox for its results. The outbox is private memory, from which the supervisor copies
pixels into the arena. Workers cannot access the arena. A worker reads bytes of one tenant, and is
replaced before it would get another's (`ReplaceWorker`). So the effects of hostile bytes (a crash,
a hang, injected code) end with the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from saccade.core.recipe import PreprocessParams
from saccade.ipc.child import Channel, Disconnected
from saccade.media.content import Probe
from saccade.media.reasons import Reason, Undecodable, Unreadable
from saccade.media.workers.orders import (
    HEADER_BYTES,
    Answer,
    Decode,
    Decoded,
    DocumentPiece,
    Header,
    Order,
    ReadDocument,
    ReadHeaders,
)

Bytes = npt.NDArray[np.uint8]
Target = tuple[Bytes, PreprocessParams]
"""A canvas [height, width, 3], and the parameters for the image that is written to it."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerResources:
    """The file descriptors and memory that a sandboxed worker keeps."""

    inbox: int  # fd of the encoded bytes
    outbox: Bytes  # memory for the results; empty for workers that read headers
    statm: int  # fd of /proc/self/statm, to read the size of the address space
    threads: bool = False  # whether decoders may start threads


def serve(channel: Channel[Answer, Order], resources: WorkerResources) -> None:
    """Receive orders and send answers until the supervisor exits."""
    with contextlib.suppress(Disconnected):
        while True:
            order = channel.receive()
            if isinstance(order, ReadHeaders):
                for place in range(len(order.places)):
                    channel.send(read_header(order, place, resources))
            elif isinstance(order, ReadDocument):
                for place in range(order.answers):
                    channel.send(read_piece(order, place, resources))
            elif isinstance(order, Decode):
                begun = time.perf_counter()
                reason = decode(order, resources)
                ms = (time.perf_counter() - begun) * 1e3
                channel.send(Decoded(order.worker, order.serial, reason, ms))


class TimeUp(BaseException):
    """Raised when CPU time is used up. It is a BaseException so that parsers do not catch it."""


def read_header(order: ReadHeaders, place: int, resources: WorkerResources) -> Header:
    """Read the header at index `place` of an order, and return it or the reason why that fails."""
    # Imported here so that importing this module does not load image parsers.
    from saccade.media.formats.header import probe

    if order.videos:
        from saccade.media.formats.container import read_metadata as probe  # type: ignore[assignment]

    offset, nbytes = order.places[place]

    def answer(found: Probe | None, reason: Reason | None = None, slow: bool = False) -> Header:
        return Header(order.worker, order.serial, place, found, reason, slow)

    with limited_memory(HEADER_BYTES + 2 * nbytes, resources.statm):
        try:
            if not nbytes:
                return answer(probe(b"", order.max_pixels))
            with (
                mmap.mmap(resources.inbox, nbytes, prot=mmap.PROT_READ, offset=offset) as data,
                limited_time(order.seconds),
            ):
                return answer(probe(data, order.max_pixels))
        except Unreadable as error:
            return answer(None, error.reason)
        except MemoryError:
            return answer(None, Reason("header memory"))
        except TimeUp:
            return answer(None, Reason("header time"), slow=True)


def read_piece(order: ReadDocument, place: int, resources: WorkerResources) -> DocumentPiece:
    """Write one page of a document, or the sizes of all pages, into the outbox.

    Returns the answer for the front end.
    """
    from saccade.media.formats import pdf  # imported here because the extra may not be installed

    def answer(nbytes: int, reason: Reason | None = None) -> DocumentPiece:
        return DocumentPiece(order.worker, order.serial, place, nbytes, reason)

    with (
        limited_memory(order.memory, resources.statm),
        mmap.mmap(resources.inbox, order.nbytes, prot=mmap.PROT_READ) as data,
    ):
        try:
            if order.pages:
                page = order.pages[place]
                found: object = pdf.read_page(data, page)
            else:
                found = pdf.read_sizes(data, order.most_pages)
            packed = msgspec.msgpack.encode(found)
            start, end = order.outbox[place : place + 2]
            if len(packed) > end - start:
                raise MemoryError
            resources.outbox[start : start + len(packed)] = np.frombuffer(packed, np.uint8)
        except Unreadable as error:
            return answer(0, error.reason)
        except MemoryError:
            return answer(0, Reason("page memory"))
        return answer(len(packed))


def decode(order: Decode, resources: WorkerResources) -> Reason | None:
    """Decode the image of one order into the outbox. Return the reason if that fails, else None."""
    # Imported here because workers that read headers do not need it.
    from saccade.media.formats.decode import decode_into

    if order.threads and not resources.threads:
        return Reason("no threads")
    with mmap.mmap(resources.inbox, order.nbytes, prot=mmap.PROT_READ) as held:
        data = memoryview(held)
        targets: list[Target] = []
        for (_, recipe), start in zip(order.targets, order.outbox):
            pixels = resources.outbox[start : start + 3 * prod(recipe.canvas)]
            targets.append((pixels.reshape(*recipe.canvas, 3), recipe))
        with limited_memory(order.memory, resources.statm):
            try:
                if order.frames:
                    _decode_video(order, held, targets)
                else:
                    shape = order.upright, order.orientation
                    decode_into(targets, data, *shape, order.regions)
            except Undecodable as error:
                return error.reason
            except ValueError:
                return Reason("damaged")
            except MemoryError:
                return Reason("memory")
            except (ImportError, OSError):  # a library's lazy import, which `warm_up` missed
                return Reason("late load")
            finally:
                data.release()
    return None


def _decode_video(order: Decode, held: mmap.mmap, targets: Sequence[Target]) -> None:
    from saccade.media.formats.container import decode_frames
    from saccade.media.formats.decode import draw_into, turn

    height, width = order.upright
    stored = (width, height) if order.orientation >= 5 else (height, width)
    wanted: dict[int, list[Target]] = {}
    for target, index in zip(targets, order.frames, strict=True):
        wanted.setdefault(index, []).append(target)

    def take(index: int, pixels: Bytes) -> None:
        upright = turn(pixels, order.orientation)
        draw_into(wanted[index], order.upright, lambda top, bottom: upright[top:bottom])

    decode_frames(held, list(wanted), stored, take)


@contextmanager
def limited_memory(more: int, statm: int) -> Iterator[None]:
    """Limit how much the address space of this process grows until the context exits.

    more: the limit, in bytes.
    statm: a file descriptor of /proc/self/statm.
    """
    pages = int(os.pread(statm, 64, 0).split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + more
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the context once this process has used `seconds` of CPU time.

    During a call of C code, the exception is raised when the call returns.
    """

    def give_up(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGPROF, give_up)
    # Repeat the signal, because a `finally` block in a parser may swallow the first exception.
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
