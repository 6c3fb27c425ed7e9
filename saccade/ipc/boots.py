"""Boot messages of the engine and its workers.

Apart from all other messages, whose types take longer to import than a worker is to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineBoot:
    """To the engine, which starts `ranks` workers. `arena_fd` is inherited, and gets its size
    later.
    """

    arena_fd: int
    ranks: int


@dataclass(frozen=True, slots=True)
class WorkerBoot:
    """To the worker of `rank`. Both descriptors are inherited; over `group_fd` the ranks meet
    (`parallel.join`).
    """

    rank: int
    group_fd: int
    arena_fd: int
