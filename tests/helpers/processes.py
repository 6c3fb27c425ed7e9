"""The processes of a server, once it has as many as it is to have."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil


def children_of(
    process: psutil.Process, least: int, but: Collection[int] = ()
) -> list[psutil.Process]:
    """All processes below this one, apart from the ids `but`. Image workers may come after
    `/health` says that the model is ready.
    """
    deadline = time.monotonic() + 60
    while True:
        found = [each for each in process.children(recursive=True) if each.pid not in but]
        if len(found) >= least:
            return found
        assert time.monotonic() < deadline, f"{len(found)} processes, not {least}"
        time.sleep(0.05)
