"""The engine process: `python -m saccade.engine.main`, started by `engine/link.py`.

It starts its workers before its own imports, because the workers' imports take the longest.
"""

from __future__ import annotations

import os
import sys

from saccade.ipc.boots import EngineBoot, WorkerBoot
from saccade.ipc.child import Child, enter
from saccade.ipc.memory import begin_imports, end_imports

MODULE = "saccade.runtime.process"


def main() -> int:
    """Run the engine. Returns exit status 0 after an orderly stop, otherwise 1."""
    boot, parent = enter(EngineBoot)
    begun = begin_workers(boot.ranks, boot.arena_fd)
    begin_imports()
    import uvloop

    from saccade.engine.process import run

    end_imports()
    return uvloop.run(run(boot.arena_fd, parent, begun))


def begin_workers(ranks: int, arena_fd: int) -> list[Child]:
    """Start all worker processes. They are killed when the calling thread exits."""
    group_fd = os.memfd_create("saccade-ranks", os.MFD_CLOEXEC)
    inherited = group_fd, arena_fd
    begun = [Child.spawn(MODULE, WorkerBoot(rank, *inherited), inherited) for rank in range(ranks)]
    os.close(group_fd)
    return begun


if __name__ == "__main__":
    sys.exit(main())
