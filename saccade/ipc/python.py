"""Starts Python processes with the same import path as this process, except for the current
directory.

`python -m` searches the current directory first, so it would run a `random.py` from a directory of
downloads. This module does not depend on the modules that it starts.
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
    """Return a command that runs a module of Saccade as `python -m` would."""
    # If the user chose -I, use it again. It includes -P, which excludes the current directory.
    return [sys.executable, "-I" if sys.flags.isolated else "-P", str(LAUNCHER), module, *words]


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environment` to run Python with.

    Relative entries of PYTHONPATH become absolute paths, based on the directory in which this
    process was started. Python processes that libraries start do not search the current directory
    either.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    folders = [str(Path(entry).absolute()) for entry in entries]
    # Python made these entries absolute when this process started. One that is missing in sys.path
    # referred to another directory at that time.
    known = [folder for entry, folder in zip(entries, folders) if entry == folder or _known(folder)]
    path = {"PYTHONPATH": os.pathsep.join(known)} if environment.get("PYTHONPATH") else {}
    return {**environment, **path, "PYTHONSAFEPATH": "1"}


def _known(folder: str) -> bool:
    return folder in map(os.path.normpath, sys.path)


def start_python(
    module: str, *words: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process that runs a module of Saccade.

    environment: the process's environment; None uses this process's environment.
    options: passed to `subprocess.Popen`. Raises OSError.
    """
    inherited = os.environ if environment is None else environment
    command = python_command(module, *words)
    return subprocess.Popen(command, env=python_environment(inherited), **options)
