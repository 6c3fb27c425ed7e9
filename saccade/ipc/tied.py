"""Starts processes that the kernel kills when their parent exits for any reason.

`python -m saccade.ipc.tied PARENT COMMAND...` runs the command. PARENT is the pid of the process
that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.ipc.python import python_command, python_environment

_PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` in a child of this process. The kernel kills the child
    when the thread that started it exits.
    """
    return python_command("saccade.ipc.tied", str(os.getpid()), *command)


def start_tied(
    module: str, *words: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process that runs a module of Saccade. The kernel kills it when the calling thread
    exits.

    environment: the process's environment; None uses this process's environment.
    options: passed to `subprocess.Popen`. Raises OSError.
    """
    inherited = os.environ if environment is None else environment
    command = tied(python_command(module, *words))
    return subprocess.Popen(command, env=python_environment(inherited), **options)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, whose pid is `parent`, exits."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it exited before the line above
        os._exit(1)


def main() -> None:
    """Replace this process with COMMAND."""
    end_with(int(sys.argv[1]))
    command = sys.argv[2:]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
