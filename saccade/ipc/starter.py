"""The code that runs first in every child process. `child.py` starts it with the arguments MODULE
SOCKET PIPE PARENT.

Before any slow import, it has the kernel kill this process if the parent exits, so that the child
does not outlive a parent that exits during the imports. It changes to the directory `/`, because
libraries read settings from the current directory (Numba does, and its settings may move its caches
anywhere). The main function of MODULE must call `child.enter`.
"""

from __future__ import annotations

import os
import runpy
import sys

from saccade.ipc.child import tie
from saccade.ipc.memory import begin_imports


def main() -> None:
    """Run the module named by the first command-line argument as `__main__`."""
    module = sys.argv.pop(1)
    tie(int(sys.argv[3]))
    os.chdir("/")
    begin_imports()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
