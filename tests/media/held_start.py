"""Image workers that start upon SIGUSR2, and fail to upon SIGUSR1, for `test_worker_start.py`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection

from saccade.media.workers import supervisor
from saccade.media.workers.sandbox import confine

SIGNALS = {signal.SIGUSR1, signal.SIGUSR2}


def wait_and_confine(keep: Collection[int], memory: int, threads: bool = False) -> list[str]:
    if signal.sigwait(SIGNALS) == signal.SIGUSR1:
        os._exit(1)
    return confine(keep, memory, threads)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    vars(supervisor)["confine"] = wait_and_confine
    sys.exit(supervisor.main())
