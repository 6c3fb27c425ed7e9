"""The first message to the engine process and to each of its workers.

These types are in a separate module so that workers start early. Importing the types of all other
messages is slow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineBoot:
    """The first message to the engine process, which inherits `arena_fd`."""

    arena_fd: int  # inherited; the arena is empty until the front-end process has chosen its size
    ranks: int  # worker processes to start


@dataclass(frozen=True, slots=True)
class WorkerBoot:
    """The first message to the worker process of rank `rank`, which inherits both file
    descriptors.
    """

    rank: int
    group_fd: int  # the file over which ranks find each other (`parallel.join`)
    arena_fd: int
