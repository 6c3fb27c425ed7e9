"""The ways in which several ranks reach each other: memory shared by processes (CPU),
torch.distributed (gloo, NCCL), or torch's symmetric memory (CUDA). One rank imports none.

They meet over an inherited descriptor of an anonymous file, without names or ports.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from saccade.parallel import PeerLost, Shard

Backend = Literal["shm", "gloo", "nccl", "symm-mem"]

PAGE = 4096
LINE = 8
"""Counters of one cache line, so that no two ranks write the same line."""
SLOT = 1 << 20
"""Bytes of one rank's slot of shared memory; larger tensors go in pieces."""
PATIENT_SPINS = 200
"""Looks at the others before a rank sleeps in between: where cores are fewer than ranks, spinning
takes time from whom it waits for.
"""
SYMMETRIC_BYTES = 64 << 20
"""Largest tensor reduced in symmetric memory: a sum of 8,192 tokens of a hidden size of 4,096."""
ONE_SHOT_BYTES = 256 << 10
CONNECT_SECONDS = 120
"""Ranks meet within so long."""
COLLECTIVE_SECONDS = 600
"""A collective waits so long for a rank that still compiles or captures. A rank that dies ends the
others at once, through the engine.
"""


def join(backend: Backend, rank: int, size: int, fd: int) -> Shard:
    """Join the other ranks over `fd`, an empty memory file inherited by every rank's process.

    Each calls this function once. On CUDA, the rank's device is the current one.
    """
    if backend == "shm":
        return Shard(rank, size, SharedMemory(rank, size, fd))
    # All on one host: listen on loopback only.
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    store = dist.FileStore(f"/proc/self/fd/{fd}", size)  # type: ignore[attr-defined]
    wire = "gloo" if backend == "gloo" else "nccl"
    store.set_timeout(timedelta(seconds=CONNECT_SECONDS))
    patience = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group(wire, store=store, rank=rank, world_size=size, timeout=patience)
    assert dist.group.WORLD is not None
    group = Distributed(dist.group.WORLD)
    return Shard(rank, size, SymmetricMemory(group) if backend == "symm-mem" else group)


class SharedMemory:
    """Collectives through memory mapped by all ranks' processes.

    They wait for each other by watching counters. Rank r's counter is the number of its messages so
    far. Messages alternate between two slots per rank: the writer of message n + 2 has seen
    everybody's counter at n + 1, so everybody is done with message n.

    A counter must become visible only after its message. x86 keeps stores in order, other
    processors may not.
    """

    def __init__(self, rank: int, size: int, fd: int) -> None:
        self._rank = rank
        self._size = size
        self._sent = 0
        nbytes = PAGE + 2 * size * SLOT
        os.ftruncate(fd, nbytes)
        self._memory = mmap.mmap(fd, nbytes)
        self._counters = np.frombuffer(self._memory, np.int64, count=size * LINE)[::LINE]
        self._slots: dict[torch.dtype, torch.Tensor] = {}  # [2, size, values of a slot] by dtype

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        total = torch.empty_like(flat)
        step = SLOT // x.element_size()
        for start in range(0, flat.shape[0], step):
            piece = total[start : start + step]
            everyones = self._exchange(flat[start : start + step])
            torch.add(everyones[0], everyones[1], out=piece)
            for other in everyones[2:]:
                piece += other
        return total.view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        gathered = torch.empty((self._size, flat.shape[0]), dtype=x.dtype)
        step = SLOT // x.element_size()
        for start in range(0, flat.shape[0], step):
            gathered[:, start : start + step] = self._exchange(flat[start : start + step])
        return gathered.view(self._size, *x.shape)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        step = SLOT // x.element_size()
        for start in range(0, flat.shape[0], step):
            piece = flat[start : start + step]
            first = self._exchange(piece, speaks=self._rank == 0)[0]
            if self._rank:
                piece.copy_(first)
        return x

    def leave(self) -> None:
        pass

    def _exchange(self, piece: torch.Tensor, *, speaks: bool = True) -> torch.Tensor:
        """Return everyone's piece [size, n], in shared memory. Read it before the next exchange.

        A silent rank's piece is left undefined.
        """
        if piece.dtype not in self._slots:
            values = torch.frombuffer(self._memory, dtype=piece.dtype, offset=PAGE)
            self._slots[piece.dtype] = values.view(2, self._size, -1)
        slots = self._slots[piece.dtype][self._sent % 2, :, : piece.shape[0]]
        if speaks:
            slots[self._rank].copy_(piece)
        self._sent += 1
        self._counters[self._rank] = self._sent
        spins = 0
        while (self._counters < self._sent).any():
            spins += 1
            if spins < PATIENT_SPINS:
                os.sched_yield()
            else:
                time.sleep(2e-5)
        return slots


class Distributed:
    """torch.distributed's collectives: gloo between CPU ranks, NCCL between GPUs (also inside CUDA
    graphs).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.asyncOp = False  # NCCL computes on the current stream, without events in between
        self._finish(lambda: self.group.allreduce([x], options))
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.asyncOp = False
        self._finish(lambda: self.group.broadcast([x], options))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty((self.group.size(), *x.shape), dtype=x.dtype, device=x.device)
        if not x.numel():  # gloo cuts what has none in one piece
            return gathered
        options = AllgatherOptions()
        options.asyncOp = False
        # Into one tensor: into a list of them, NCCL's pieces would be copied once more.
        flat, mine = gathered.view(-1), x.view(-1)
        self._finish(lambda: self.group._allgather_base(flat, mine, options))
        return gathered

    def leave(self) -> None:
        dist.destroy_process_group()

    def _finish(self, start: Callable[[], dist.Work | None]) -> None:
        try:
            work = start()
            if work is not None:  # else it has ended already, or is in stream order
                work.wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error


class SymmetricMemory:
    """All-reduce in memory mapped by every GPU (torch symmetric memory).

    It makes no call to NCCL, and takes a few microseconds for a decode step's sums. Small tensors
    are read by every rank at once. Larger ones are reduced in the switch if able (NVLink SHARP),
    else in two shots. NOT YET RUN: written against the documented operators of torch 2.11 to 2.13,
    on a machine without GPUs.
    """

    def __init__(self, fallback: Distributed) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._fallback = fallback
        self._name = fallback.group.group_name
        self._unit = 16 * fallback.group.size()  # each rank reduces whole vectors of 16 bytes
        device = torch.device("cuda", torch.cuda.current_device())
        self._bytes = symmetric.empty(SYMMETRIC_BYTES, dtype=torch.uint8, device=device)
        self._multicast = symmetric.rendezvous(self._bytes, self._name).multicast_ptr != 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        # torch's kernels are made for these types alone.
        known = x.dtype in (torch.bfloat16, torch.float32)
        if not known or x.nbytes > SYMMETRIC_BYTES or x.nbytes % self._unit:
            return self._fallback.all_reduce(x)
        shared = self._bytes[: x.nbytes].view(x.dtype).view(x.shape)
        shared.copy_(x)
        if x.nbytes <= ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name)
        reduce = (
            torch.ops.symm_mem.multimem_all_reduce_
            if self._multicast
            else torch.ops.symm_mem.two_shot_all_reduce_
        )
        return x.copy_(reduce(shared, "sum", self._name))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._fallback.all_gather(x)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._fallback.broadcast(x)

    def leave(self) -> None:
        self._fallback.leave()
