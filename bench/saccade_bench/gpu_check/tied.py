"""A Python module that ends with the process that started it, whatever that died of.

`python -m saccade_bench.gpu_check.tied PARENT MODULE ARGUMENT...`: the kernel kills what becomes of
this process when PARENT, the id of the process that started it, is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

NAME = "saccade_bench.gpu_check.tied"
_PR_SET_PDEATHSIG = 1


def tied(module: str, *arguments: str) -> list[str]:
    """The command that runs a module tied to this process. It keeps its id."""
    return [sys.executable, "-m", NAME, str(os.getpid()), module, *arguments]


def main() -> None:
    """Become the module."""
    parent, *words = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else ignored where a shell runs it beside others
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)
    os.execv(sys.executable, [sys.executable, "-m", *words])


if __name__ == "__main__":
    main()
