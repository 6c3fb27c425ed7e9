"""The environment variables of the processes that a server starts, without API keys. Also removes
keys from a process's own environment.

`/proc/PID/environ` still shows the initial environment after variables are unset, so `forget` also
overwrites that memory.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

KEY_VARIABLES = "SACCADE_API_KEY", "SACCADE_ENCODER_KEY"
"""Environment variables with Saccade's API keys."""
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|HEADERS)$", re.IGNORECASE)
"""Matches names of variables that usually contain credentials. Processes that only compute do not
need them. (OTEL_EXPORTER_OTLP_HEADERS contains keys.)
"""
PLAIN = re.compile(
    r"PATH|HOME|XDG_CACHE_HOME|LANG|LC_[A-Z]+|TZ|TMPDIR|VIRTUAL_ENV|GLIBC_TUNABLES"
    r"|(LD|PYTHON|MALLOC|OMP|GOMP|KMP|MKL|OPENBLAS|ATEN|DNNL|ONEDNN)_?[A-Z0-9_]*"
)
"""Matches all variables that a process needs if it only computes."""
ENV_START = 47
"""Index of the field `env_start` of `/proc/self/stat`, counted after the program's name. The next
field is `env_end`.
"""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without credentials, for processes that send no requests to other
    hosts.
    """
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


def bare(environment: Mapping[str, str]) -> dict[str, str]:
    """Return only the variables in `PLAIN`, for processes that a malicious image could take
    over.
    """
    return {name: value for name, value in environment.items() if PLAIN.fullmatch(name)}


def forget(*names: str) -> None:
    """Unset environment variables, and overwrite their values with zeros in the memory that /proc
    shows.

    No other thread may use the environment during the call.
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
"""How many iterations an idle OpenMP thread of the engine spins before it sleeps, which takes some
tens of microseconds. By default threads spin forever, which is 40 times slower if they share cores
with other threads. If they never spin, a small model is 1.6 times slower on an idle machine
(decision 001).
"""
ALLOCATION = "expandable_segments:True"
"""Setting of PyTorch's CUDA allocator. In segments of fixed size, embeddings of different sizes
would leave unusable gaps.
"""


def engine_environment() -> dict[str, str]:
    """Return the environment for the engine process and its workers.

    It is the user's environment without credentials. It also limits OpenMP's spinning and uses
    expandable segments for GPU memory, unless the user has set the corresponding variables.
    """
    environment = without_secrets(os.environ)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = OPENMP_SPINS
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = ALLOCATION
    return environment


def image_environment() -> dict[str, str]:
    """Return the environment for image workers.

    Each worker uses only one thread, because a forked process would lose all others.
    """
    return bare(os.environ) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
