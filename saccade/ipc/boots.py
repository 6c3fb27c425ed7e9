"""Boot messages of the engine and its workers.

They are separate from all other messages, whose types would delay a worker's start, as they take
long to import.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineBoot:
    """Boot message of the engine."""

    arena_fd: int  # inherited; empty until the front has chosen its size
    ranks: int  # worker processes to start


@dataclass(frozen=True, slots=True)
class WorkerBoot:
    """Boot message of the worker of `rank`. It inherits both descriptors."""

    rank: int
    group_fd: int  # the file over which ranks find each other (`parallel.join`)
    arena_fd: int
