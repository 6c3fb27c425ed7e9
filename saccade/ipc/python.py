"""How every Python process is started: it imports what this process imports, and no file of the
folder that it is started in.

`python -m` searches the current folder first, and so would run a `random.py` among downloads. Knows
nothing of the modules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAUNCHER = Path(__file__).with_name("launch.py").absolute()


def python_command(module: str, *words: str) -> list[str]:
    """Return the words that run a module of Saccade as `python -m` does."""
    # -I is the user's own choice, and includes -P: no current folder.
    return [sys.executable, "-I" if sys.flags.isolated else "-P", str(LAUNCHER), module, *words]


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a Python process.

    A relative entry of PYTHONPATH keeps the folder that it named when this process started. Python
    processes that libraries start search no current folder either.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    folders = [str(Path(entry).absolute()) for entry in entries]
    # Python has made them absolute here: one that is missing meant another folder then.
    known = [folder for entry, folder in zip(entries, folders) if entry == folder or _known(folder)]
    path = {"PYTHONPATH": os.pathsep.join(known)} if environment.get("PYTHONPATH") else {}
    return {**environment, **path, "PYTHONSAFEPATH": "1"}


def _known(folder: str) -> bool:
    return folder in map(os.path.normpath, sys.path)


def start_python(
    module: str, *words: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process that runs a module of Saccade.

    environment: this process's if None. options: those of `subprocess.Popen`. Raises OSError.
    """
    inherited = os.environ if environment is None else environment
    command = python_command(module, *words)
    return subprocess.Popen(command, env=python_environment(inherited), **options)
