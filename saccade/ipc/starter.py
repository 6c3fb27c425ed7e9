"""The first moments of a child process: `python -m saccade.ipc.starter MODULE SOCKET WORDS
PARENT`, started by `child.py`.

A child is tied to its parent before any slow import: a parent that dies meanwhile takes the child
along. Knows of the module only that its main calls `child.enter`.
"""

from __future__ import annotations

import runpy
import sys

from saccade.ipc.child import tie
from saccade.ipc.memory import begin_imports


def main() -> None:
    """Become the module."""
    module = sys.argv.pop(1)
    tie(int(sys.argv[3]))
    begin_imports()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
