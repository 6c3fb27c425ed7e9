"""The environment of processes that a server starts, without its keys, and how a process forgets
its own. `/proc/PID/environ` shows the block from the start of a process, even after variables are
unset, so the block is overwritten.
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
    """Return the environment without keys, for processes that make no requests."""
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
    except OSError:  # without /proc, the environment is not visible
        return
    start, end = (int(field) for field in fields[ENV_START : ENV_START + 2])
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        known, sign, value = entry.partition(b"=")
        if sign and known.decode(errors="replace") in names:
            ctypes.memset(at + len(known) + 1, 0, len(value))
        at += len(entry) + 1


OPENMP_SPINS = "4000"
"""Turns that an idle OpenMP thread of the engine spins before it sleeps, some tens of microseconds.
Threads that spin without end, the library's default, are 40 times slower where others share their
cores. Threads that never spin make a small model 1.6 times slower on an idle machine (decision
001).
"""
ALLOCATION = "expandable_segments:True"
"""Embeddings differ in size: in segments of fixed sizes they leave gaps that no other fits into."""


def engine_environment() -> dict[str, str]:
    """Return the environment for the engine process and its workers.

    It is the user's without keys. It bounds OpenMP's spinning and lets GPU memory segments grow,
    unless the user sets these.
    """
    environment = without_secrets(os.environ)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = OPENMP_SPINS
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = ALLOCATION
    return environment


def image_environment() -> dict[str, str]:
    """Return the environment for image workers.

    Each has one thread, as more would be lost in a fork.
    """
    return bare(os.environ) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
