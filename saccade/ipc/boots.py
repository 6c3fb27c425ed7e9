"""Boot messages of the engine and its workers.

These are in a separate module so that workers start early: importing the types of all other
messages takes long.
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
