"""The environment of processes that a server starts, without its keys. Knows nothing of options."""

from __future__ import annotations

import os

from saccade.ipc.secrets import bare, without_secrets

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
