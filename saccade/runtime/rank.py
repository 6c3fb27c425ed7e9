"""The process of a rank other than the first: `python -m saccade.runtime.rank`, started by
`engine/ranks.py` with a `RankBoot` on standard input. It loads its slice of the model, then
executes the plans that come down its socket.

Holds no scheduler state and answers nothing: it reports that it has loaded, that it lives, and why
it ends. It dies with the engine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import torch

from saccade.core.arena import Arena
from saccade.core.config import Dtype, EngineConfig, Hardware, ParallelConfig, PatchEmbedding
from saccade.core.errors import StartupError
from saccade.core.plan import Plan
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.parallel import PeerLost, Shard, join, leave
from saccade.runtime.weights import LoadFormat, load_net
from saccade.runtime.worker import DTYPES, Worker

HEARTBEAT_SECONDS = 0.5
PEER_LOST = 3
"""Exit status of a rank that ends because another has."""

_PR_SET_PDEATHSIG = 1
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank holds: the same on every rank but for `rank`.

    `group_fd` is where the ranks meet (`parallel.join`).
    """

    rank: int
    folder: str
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    format: LoadFormat
    threads: int
    parallel: ParallelConfig
    group_fd: int
    patch_embed: PatchEmbedding = "exact"


@dataclass(frozen=True, slots=True)
class RankBoot:
    """What a rank's process needs to know; the descriptors are inherited.

    On `socket_fd` come an EngineConfig, then Plans.
    """

    parent: int
    load: Load
    socket_fd: int
    arena_fd: int
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """From a rank to the engine: `loaded` once, `error` at its end; an empty one says that it
    lives.
    """

    loaded: Hardware | None = None
    error: str | None = None


def main() -> int:
    """Exit status 0 when the engine said so or has gone, 1 after an error of this rank, PEER_LOST
    after another's.
    """
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RankBoot)
    die_with_parent(boot.parent)
    leave_signals_to_front()
    socket = Connection(boot.socket_fd)
    try:
        serve(boot, socket)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the engine has gone
    except PeerLost:
        return PEER_LOST
    except Exception as error:
        known = isinstance(error, StartupError)
        if not known:
            traceback.print_exc()
        with suppress(OSError):
            socket.send_bytes(
                _ENCODER.encode(
                    Report(error=str(error) if known else f"{type(error).__name__}: {error}")
                )
            )
        return 1
    leave()
    return 0


def serve(boot: RankBoot, socket: Connection) -> None:
    """Load, then execute plans until an empty message."""
    net, shard = load(boot.load)
    socket.send_bytes(_ENCODER.encode(Report(loaded=measure_hardware(boot.load.device))))
    config = msgspec.msgpack.decode(socket.recv_bytes(), type=EngineConfig)
    worker = Worker(
        net,
        config,
        Arena.attach(boot.arena_fd, boot.arena_bytes),
        shard,
        boot.load.parallel.encoder,
    )
    plans = msgspec.msgpack.Decoder(Plan)
    threading.Thread(target=_beat, args=(socket,), daemon=True).start()
    while message := socket.recv_bytes():
        worker.execute(plans.decode(message))


def _beat(socket: Connection) -> None:
    try:
        while True:
            socket.send_bytes(_ENCODER.encode(Report()))
            time.sleep(HEARTBEAT_SECONDS)
    except OSError:
        return  # the engine has gone; the main thread finds out by itself


def load(wanted: Load) -> tuple[FamilyNet, Shard]:
    """This rank's slice of the model, and its link to the other ranks. Raises StartupError."""
    torch.set_num_threads(wanted.threads)
    if wanted.device == "cuda":
        torch.cuda.set_device(wanted.rank)
        # On Hopper it is PyTorch's first choice, and plans for half a second whenever a shape is
        # new: so would every picture size.
        torch.backends.cuda.enable_cudnn_sdp(False)
    shard = join(wanted.parallel.all_reduce, wanted.rank, wanted.parallel.size, wanted.group_fd)
    folder = Path(wanted.folder)
    net = load_net(
        load_spec(folder),
        folder,
        dtype=DTYPES[wanted.dtype],
        device=torch.device(wanted.device),
        shard=shard,
        encoder=wanted.parallel.encoder,
        patch_embed=wanted.patch_embed,
        load_format=wanted.format,
        progress=wanted.rank == 0,
    )
    return net, shard


def measure_hardware(device: Literal["cpu", "cuda"]) -> Hardware:
    """What the current device is and what it has left."""
    memory = psutil.virtual_memory()
    if device == "cuda":
        torch.cuda.empty_cache()  # what loading needed for a moment
        free, total = torch.cuda.mem_get_info()
        return Hardware("cuda", torch.cuda.get_device_name(), total, free, memory.available)
    return Hardware("cpu", f"{torch.get_num_threads()} threads", memory.total, memory.available)


def leave_signals_to_front() -> None:
    """Ctrl-C, and an order to stop that goes to all processes, are for the front: it ends the
    engine in order, which ends its ranks.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it, `parent`, is gone, however it
    went.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    # Nothing is left to be put in order, and the interpreter takes a second to take torch down.
    os._exit(main())
