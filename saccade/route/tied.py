"""A command of `saccade` that ends with its starter, however the starter dies.

`python -m saccade.route.tied PARENT WORD...`: the kernel kills this process when PARENT, the id of
its starter, is gone. Knows nothing of the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command."""
    parent, *words = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "saccade", *words])


if __name__ == "__main__":
    main()
