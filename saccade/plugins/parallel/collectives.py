"""The transports between tensor-parallel ranks: shared memory (CPU), torch.distributed (gloo, NCCL)
and torch's symmetric memory (CUDA).

With a single rank, this module is not imported. Ranks find each other through an anonymous file
whose descriptor they inherit, so they need no names or ports.
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
"""Number of 64-bit counters that fill a cache line. Each rank's counter has a cache line to
itself.
"""
SLOT = 1 << 20
"""Size of a rank's slot in shared memory, in bytes. Larger tensors are sent in chunks."""
PATIENT_SPINS = 200
"""Number of polls after which a rank sleeps between polls. If there are fewer cores than ranks, a
polling rank takes CPU time from the rank that it waits for.
"""
SYMMETRIC_BYTES = 64 << 20
"""Maximum bytes of a tensor that is reduced in symmetric memory. They suffice for 8,192 tokens with
a hidden size of 4,096 in bfloat16.
"""
ONE_SHOT_BYTES = 256 << 10
"""Maximum bytes of a tensor that every rank sums by itself."""
CONNECT_SECONDS = 120
"""Seconds in which all ranks have to connect."""
COLLECTIVE_SECONDS = 600
"""Timeout of a collective in seconds. It is long because other ranks may still be compiling or
capturing. If a rank crashes, the engine stops the others at once.
"""


def join(backend: Backend, rank: int, size: int, fd: int) -> Shard:
    """Connect to the other ranks, and return this rank's shard.

    fd: an empty memory file, which the processes of all ranks inherit.

    Each rank calls this function once. On CUDA, its device must be the current one.
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
    """Collectives over memory that is mapped into the process of every rank.

    Ranks wait for each other by polling counters. The counter of a rank is the number of messages
    it has sent. Messages alternate between two slots per rank. Before a rank writes message n + 2,
    it has seen every counter reach n + 1, so all ranks have finished reading message n.

    A counter must become visible only after its message. x86 keeps stores in order. Other CPUs may
    not.
    """

    def __init__(self, rank: int, size: int, fd: int) -> None:
        self._rank = rank
        self._size = size
        self._sent = 0
        nbytes = PAGE + 2 * size * SLOT
        os.ftruncate(fd, nbytes)
        self._memory = mmap.mmap(fd, nbytes)
        self._counters = np.frombuffer(self._memory, np.int64, count=size * LINE)[::LINE]
        self._slots: dict[torch.dtype, torch.Tensor] = {}  # by dtype: [2, size, values per slot]

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
        """Send this rank's chunk, and return the chunks of all ranks, [size, n], in shared memory.
        They must be read before the next exchange.

        speaks: if False, this rank sends nothing, and its chunk is undefined.
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
    """Collectives of torch.distributed: gloo on CPUs, NCCL on GPUs (also inside CUDA graphs)."""

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
        if not x.numel():  # there are no values to exchange
            return gathered
        options = AllgatherOptions()
        options.asyncOp = False
        # Gather into one tensor. With a list of tensors, NCCL's results would be copied again.
        flat, mine = gathered.view(-1), x.view(-1)
        self._finish(lambda: self.group._allgather_base(flat, mine, options))
        return gathered

    def leave(self) -> None:
        dist.destroy_process_group()

    def _finish(self, start: Callable[[], dist.Work | None]) -> None:
        try:
            work = start()
            if work is not None:  # None: already finished, or ordered by the stream
                work.wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error


class SymmetricMemory:
    """All-reduce in memory that is mapped by every GPU (torch symmetric memory).

    It avoids NCCL calls, and takes a few microseconds for the sums of a decode step. Each rank
    reads and sums small tensors by itself. Larger tensors are reduced in the NVLink switch if it
    supports that (NVLink SHARP), or else in two steps. Untested: written against the documented
    operators of torch 2.11 to 2.13, on a machine without GPUs.
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
        # torch's kernels support only these types.
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
