"""A decode worker: a process that decodes one picture at a time into the arena, and dies with its
parent.

Started by `media/pool.py` as `python -m saccade.media.decode_worker JOBS ARENA ARENA_BYTES INBOX
PARENT`: three inherited descriptors (a socket for jobs and answers as JSON lines, the arena, and a
memory file with the encoded bytes of the current job), the arena's size, and the parent's process
id. Keeps nothing between jobs. Whatever hostile bytes do to it (crash, hang, blow up) ends with
this process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import PIL.Image

from saccade.core.arena import Arena
from saccade.core.plan import PixelSlot

BASE_BYTES = 256 << 20
"""Memory a job may take beside what its pixels need."""
BYTES_PER_PIXEL = 24
"""Memory a job may take per pixel of the source: an RGBA or 32-bit original, two copies in RGB, a
transposed one, and slack.
"""

KEPT_BYTES = 64 << 20
"""Freed memory that is kept for the next job: having the kernel clear it again can cost as much as
decoding.
"""

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True)
class Job:
    """Decode the inbox's first `nbytes`, a picture of `upright` (height, width), to `size` (height,
    width) at `offset` in the arena.
    """

    nbytes: int
    upright: tuple[int, int]
    orientation: int
    offset: int
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a job, after how many ms: `error` is None when the pixels lie in the arena."""

    error: str | None
    ms: float = 0.0


def encode(message: Job | Answer) -> bytes:
    return json.dumps(asdict(message)).encode() + b"\n"


def main() -> None:
    jobs_fd, arena_fd, arena_bytes, inbox_fd, parent = map(int, sys.argv[1:])
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent decides when we end
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return
    # late: it takes a second or two, an orphan should be gone before that, and the front imports
    # this module's messages
    import torch

    torch.set_num_threads(1)
    libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES // 2)  # the most it takes
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    PIL.Image.MAX_IMAGE_PIXELS = None  # the front has compared the header with its own limit
    arena = Arena.attach(arena_fd, arena_bytes)
    with socket.socket(fileno=jobs_fd) as connection, connection.makefile("rb") as jobs:
        connection.sendall(encode(Answer(error=None)))  # ready
        for line in jobs:
            begun = time.perf_counter()
            error = _run(Job(**json.loads(line)), arena, inbox_fd)
            connection.sendall(encode(Answer(error, (time.perf_counter() - begun) * 1e3)))


def _run(job: Job, arena: Arena, inbox_fd: int) -> str | None:
    """Do one job; the reason why not, if not."""
    from saccade.media.decode import decode_into

    height, width = job.upright
    with mmap.mmap(inbox_fd, job.nbytes, prot=mmap.PROT_READ) as inbox:
        _limit_memory(
            BASE_BYTES
            + 2 * job.nbytes
            + BYTES_PER_PIXEL * height * width
            + 16 * job.size[0] * job.size[1]
        )
        data = memoryview(inbox)
        try:
            decode_into(
                arena.view(PixelSlot(job.offset, *job.size)), data, (height, width), job.orientation
            )
        except ValueError as error:
            return str(error)
        except MemoryError:
            return "decoding it takes more memory than a picture of its size should"
        finally:
            data.release()
    return None


def _limit_memory(more: int) -> None:
    """Let this process's address space grow by `more` bytes from here, no further."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))


if __name__ == "__main__":
    main()
