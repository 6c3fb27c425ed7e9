"""The first moments of a child process, started by `child.py` with the words MODULE SOCKET WORDS
PARENT.

A child is tied to its parent before any slow import: a parent that dies meanwhile takes the child
along. It leaves the current folder, in which libraries look for settings (Numba does, and its
caches may be anywhere). Knows of the module only that its main calls `child.enter`.
"""

from __future__ import annotations

import os
import runpy
import sys

from saccade.ipc.child import tie
from saccade.ipc.memory import begin_imports


def main() -> None:
    """Become the module."""
    module = sys.argv.pop(1)
    tie(int(sys.argv[3]))
    os.chdir("/")
    begin_imports()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
