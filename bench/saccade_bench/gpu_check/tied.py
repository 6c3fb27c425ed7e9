"""Run a Python module, which is killed when its parent process ends for any reason.

`python -m saccade_bench.gpu_check.tied PARENT MODULE ARGUMENT...`: PARENT is the id of the process
that started it. The kernel kills this process when PARENT exits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

NAME = "saccade_bench.gpu_check.tied"
_PR_SET_PDEATHSIG = 1


def tied(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module tied to this process. It keeps its process id."""
    return [sys.executable, "-m", NAME, str(os.getpid()), module, *arguments]


def main() -> None:
    """Replace this process by the module."""
    parent, *words = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells ignore it for background processes
    if os.getppid() != int(parent):  # the parent exited before prctl
        os._exit(1)
    os.execv(sys.executable, [sys.executable, "-m", *words])


if __name__ == "__main__":
    main()
