"""Keys in the environment: the processes that have them, and how a process forgets its own.

`/proc/PID/environ` shows the block from the start of a process, even after variables are unset, so
the block is overwritten. Knows nothing of the use of keys.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

KEY_VARIABLES = "SACCADE_API_KEY", "SACCADE_ENCODER_KEY"
"""Ours."""
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|HEADERS)$", re.IGNORECASE)
"""Names of variables that nobody computes with. (OTEL_EXPORTER_OTLP_HEADERS hold keys.)"""
PLAIN = re.compile(
    r"PATH|HOME|XDG_CACHE_HOME|LANG|LC_[A-Z]+|TZ|TMPDIR|VIRTUAL_ENV|GLIBC_TUNABLES"
    r"|(LD|PYTHON|MALLOC|OMP|GOMP|KMP|MKL|OPENBLAS|ATEN|DNNL|ONEDNN)_?[A-Z0-9_]*"
)
"""All that a process needs which only computes."""
ENV_START = 47
"""Where `/proc/self/stat` has the block's begin, counted behind the program's name; its end is
next.
"""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without keys, for processes that ask nobody for anything."""
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


def bare(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the plain variables alone, for processes that hostile bytes may take over."""
    return {name: value for name, value in environment.items() if PLAIN.fullmatch(name)}


def forget(*names: str) -> None:
    """Remove variables from this process's environment, and from its block in /proc.

    Other threads must leave the environment alone meanwhile.
    """
    for name in names:
        os.environ.pop(name, None)
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:  # there is no /proc: nothing shows it
        return
    start, end = (int(field) for field in fields[ENV_START : ENV_START + 2])
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        known, sign, value = entry.partition(b"=")
        if sign and known.decode(errors="replace") in names:
            ctypes.memset(at + len(known) + 1, 0, len(value))
        at += len(entry) + 1
