"""Processes that end with their starter, however the starter ends.

`saccade.ipc.tied PARENT COMMAND...`: the kernel kills the command when PARENT, the pid of its
starter, exits.
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
    """Return the words that run `command` until it ends or the calling thread does."""
    return python_command("saccade.ipc.tied", str(os.getpid()), *command)


def start_tied(
    module: str, *words: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process that runs a module of Saccade until it ends or the calling thread does.

    environment: this process's if None. options: those of `subprocess.Popen`. Raises OSError.
    """
    inherited = os.environ if environment is None else environment
    command = tied(python_command(module, *words))
    return subprocess.Popen(command, env=python_environment(inherited), **options)


def end_with(parent: int) -> None:
    """End this process when its starter `parent` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main() -> None:
    """Become the command."""
    end_with(int(sys.argv[1]))
    command = sys.argv[2:]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
