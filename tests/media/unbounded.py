"""Image workers on a kernel that asks nobody before a thread begins, for `test_sandbox.py`."""

from __future__ import annotations

import sys

from saccade.media.workers import supervisor, thread_gate


def refuse() -> int:
    raise OSError(22, "Invalid argument")


if __name__ == "__main__":
    thread_gate._listen = refuse
    sys.exit(supervisor.main())
