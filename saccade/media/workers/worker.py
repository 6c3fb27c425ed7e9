"""The life of an image worker: a process that reads headers, decodes images or reads documents, one
at a time, and may die from hostile bytes.

`media/workers/supervisor.py` forks them. Before the first order a worker gives up everything named
by `sandbox.py`. Left are a socket to the supervisor, the encoded bytes from the front, to be read,
and for pixels an outbox. The outbox is the worker's own memory, copied by the supervisor into the
arena, which no worker ever has. A worker reads one tenant's bytes, and ends before another's come
(`ReplaceWorker`). All effects from hostile bytes (crash, hang, code that stays) end with the
process.
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
"""As in `media/formats/decode.py`."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerResources:
    """A worker's possessions: encoded bytes as a file, memory for pixels (empty to read headers),
    and the file with the address space's size. threads: may begin some.
    """

    inbox: int
    outbox: Bytes
    statm: int
    threads: bool = False


def serve(channel: Channel[Answer, Order], resources: WorkerResources) -> None:
    """Take orders and send answers until the supervisor has exited."""
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
    """An error whose class no parser catches."""


def read_header(order: ReadHeaders, place: int, resources: WorkerResources) -> Header:
    """Read one header of an order."""
    # here, not above: the front, which imports this module's messages, must not read headers
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
    """Read one page of a document, or the sizes of all, into the outbox."""
    from saccade.media.formats import pdf  # here, not above: where the extra is not installed

    def answer(nbytes: int, reason: Reason | None = None) -> DocumentPiece:
        return DocumentPiece(order.worker, order.serial, place, nbytes, reason)

    with (
        limited_memory(order.memory, resources.statm),
        mmap.mmap(resources.inbox, order.nbytes, prot=mmap.PROT_READ) as data,
    ):
        try:
            if order.pages:
                page = order.pages[place]
                found: object = pdf.read_page(data, page.index, page.drawing, page.text)
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
    """Decode one order. Returns the reason for a failure."""
    # here, not above: the worker that reads headers has no use for it
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
            except (ImportError, OSError):  # what a library loads late: `warm_up`
                return Reason("late load")
            finally:
                data.release()
    return None


def _decode_video(order: Decode, held: mmap.mmap, targets: Sequence[Target]) -> None:
    """Fill each target from a frame of the video. Raises Undecodable."""
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
    """Let this process's address space grow by at most `more` bytes from here. `statm` is the open
    file in /proc with the size.
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
    """Raise TimeUp once this process has computed for `seconds`. Native code ends first."""

    def give_up(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGPROF, give_up)
    # More than once: a `finally` of a parser may hide the first.
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
