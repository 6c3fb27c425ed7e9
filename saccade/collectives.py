"""Collectives between several ranks: in shared memory (CPU), by torch.distributed (gloo, NCCL), or
in torch's symmetric memory (CUDA). This module is not imported with a single rank.

Ranks find each other through an anonymous file, whose descriptor their processes inherit. So no
names or ports are needed.
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
"""The number of counters in a cache line. Ranks' counters are in separate lines, to avoid false
sharing.
"""
SLOT = 1 << 20
"""The bytes of one rank's slot in shared memory. Larger tensors are split."""
PATIENT_SPINS = 200
"""How often a rank polls the counters before it sleeps in between. If there are fewer cores than
ranks, spinning slows down the rank that it waits for.
"""
SYMMETRIC_BYTES = 64 << 20
"""The largest tensor that is reduced in symmetric memory: 8,192 tokens of hidden size 4,096."""
ONE_SHOT_BYTES = 256 << 10
CONNECT_SECONDS = 120
"""How long ranks wait for each other to connect."""
COLLECTIVE_SECONDS = 600
"""How long a collective waits for another rank, which may still be compiling or capturing. If a
rank crashes, the engine stops the others immediately.
"""


def join(backend: Backend, rank: int, size: int, fd: int) -> Shard:
    """Connect to the other ranks through `fd`, an empty memory file that all ranks' processes
    inherit.

    Each rank calls this function once. On CUDA, it uses the current device.
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


def leave() -> None:
    """Disconnect from the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


class SharedMemory:
    """Collectives in memory that all ranks' processes map.

    Each rank has a counter of the messages that it has written, and ranks wait by polling the
    counters. Messages alternate between two slots per rank. A rank writes message n + 2 only after
    all counters have reached n + 1, so all ranks have finished reading message n.

    A counter must become visible after its message. x86 guarantees the order of stores, but other
    CPUs may not.
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

    def _exchange(self, piece: torch.Tensor, *, speaks: bool = True) -> torch.Tensor:
        """Write this rank's piece, and return all ranks' pieces [size, n] in shared memory. They
        must be read before the next exchange. The piece of a rank for which `speaks` is False is
        undefined.
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
    """The collectives of torch.distributed: gloo between CPU ranks, and NCCL between GPUs, which
    can be captured in CUDA graphs.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.asyncOp = False  # makes NCCL use the current stream, without events
        self._finish(lambda: self.group.allreduce([x], options))
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.asyncOp = False
        self._finish(lambda: self.group.broadcast([x], options))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty((self.group.size(), *x.shape), dtype=x.dtype, device=x.device)
        if not x.numel():  # gloo does not support empty tensors
            return gathered
        options = AllgatherOptions()
        options.asyncOp = False
        # Gather into a single tensor, since NCCL would copy to a list of tensors once more.
        flat, mine = gathered.view(-1), x.view(-1)
        self._finish(lambda: self.group._allgather_base(flat, mine, options))
        return gathered

    def _finish(self, start: Callable[[], dist.Work | None]) -> None:
        try:
            work = start()
            if work is not None:  # otherwise it has finished, or is in stream order
                work.wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error


class SymmetricMemory:
    """All-reduce in memory that all GPUs map (torch symmetric memory).

    It does not use NCCL, and takes a few microseconds in a decode step. Each rank reads small
    tensors of all ranks directly (one-shot). Larger ones are reduced in the switch if it supports
    that (NVLink SHARP), otherwise by the two-shot algorithm. NOT YET RUN: this was written against
    the documentation of torch 2.11 to 2.13, on a machine without GPUs.
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
        # torch's kernels support only these dtypes.
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
