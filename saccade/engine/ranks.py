"""Decides how a model and a machine are divided among ranks: devices, shards and collectives.

This module works with sizes and counts only, not with tensors.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from saccade.core.config import EncoderMode, Hardware, ParallelConfig
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.settings import ParallelSettings

logger = logging.getLogger("saccade")

NVIDIA = Path("/dev/nvidiactl")
"""Exists if a driver for NVIDIA GPUs is loaded."""
MAX_TP = 64  # largest size that an error suggests
NARROW_ENCODER = 256
"""Below this width per rank, sharding the vision encoder's matrices costs more for collectives than
it saves.
"""


def pick_device(
    wanted: Literal["auto", "cpu", "cuda"], devices: int, ranks: int
) -> Literal["cpu", "cuda"]:
    """Return the device to use.

    Raises ConfigError if cuda is requested but not available, or if there are fewer devices than
    ranks.

    wanted: the requested device.
    devices: the number of CUDA devices that the workers see.
    """
    if wanted == "cpu":
        return "cpu"
    if wanted == "cuda" and not devices:
        raise ConfigError(
            f"--device cuda: torch sees no CUDA device: {_what_lacks(version('torch'))}, or use "
            "--device cpu"
        )
    if wanted == "auto" and not devices and NVIDIA.exists():
        logger.warning(
            "this machine has an NVIDIA GPU (%s), but torch cannot use it, so the CPU is used: "
            "install a CUDA build of torch that the driver supports, or set --device cpu to hide "
            "this warning",
            NVIDIA,
        )
    if 0 < devices < ranks:
        raise ConfigError(
            f"--tp-size, --ep-size: torch sees {devices} CUDA devices, but {ranks} ranks need one "
            "each"
        )
    return "cuda" if devices else "cpu"


def _what_lacks(torch: str) -> str:
    """Return why this version of torch cannot use a GPU, and what to install."""
    for_cpus = torch.endswith("+cpu")
    if not NVIDIA.exists():
        also = ", and a CUDA build of torch" if for_cpus else ""
        return f"there is no NVIDIA driver (no {NVIDIA}); install it{also}"
    found = "is a build for CPUs" if for_cpus else "cannot use the driver"
    return f"torch {torch} {found}; install a CUDA build that the driver supports"


def share_hardware(ranks: Sequence[Hardware]) -> Hardware:
    """Return the hardware available to each rank, given the reports of all ranks.

    On GPUs each rank has its own device, and the smallest amount of free memory counts. On CPUs the
    machine's memory is divided by the number of ranks.
    """
    free = min(each.free_bytes for each in ranks)
    first, count = ranks[0], len(ranks)
    if first.device == "cuda":
        return replace(first, free_bytes=free, host_free_bytes=first.host_free_bytes // count)
    return replace(first, total_bytes=first.total_bytes // count, free_bytes=free // count)


def resolve_parallel(
    settings: ParallelSettings, spec: FamilySpec, device: Literal["cpu", "cuda"]
) -> ParallelConfig:
    """Return how to divide the model among ranks.

    Raises ConfigError if a division is not possible. The message lists the sizes that are.
    """
    size, cuda, ranks = settings.tp_size, device == "cuda", settings.ranks
    runs = settings.ep_size
    if runs > 1 and (not spec.cuts.experts or spec.cuts.experts % runs):
        has = f"{spec.cuts.experts} experts, which cannot be divided" if spec.cuts.experts else ""
        raise ConfigError(
            f"--ep-size {runs}: the model has {has or 'no experts to divide'} among {runs} ranks"
        )

    def works(n: int) -> bool:
        return not (max(n, runs) % min(n, runs) or spec.cuts.obstacles(n, max(n, runs) // runs))

    if obstacles := spec.cuts.obstacles(size, ranks // runs):
        sizes = ", ".join(str(n) for n in range(1, MAX_TP + 1) if works(n))
        raise ConfigError(
            f"--tp-size {size}: {' and '.join(obstacles)} cannot be divided among {size} "
            f"ranks; sizes that work are {sizes}"
        )
    # The vision encoder is either sharded, or complete on each rank.
    narrow = spec.cuts.encoder_width < NARROW_ENCODER * size
    uncut = spec.cuts.encoder_obstacles(size)
    encoder: EncoderMode = "weights"
    if ranks > size or (size > 1 and (uncut or narrow)):
        encoder = "data"
    # The collectives.
    all_reduce = settings.all_reduce
    if all_reduce == "auto":
        all_reduce = "nccl" if cuda else "shm" if platform.machine() == "x86_64" else "gloo"
    elif (all_reduce in ("nccl", "symm-mem")) != cuda:
        raise ConfigError(
            f"--tune all_reduce={all_reduce} does not work on {device}; use "
            f"{'nccl or symm-mem' if cuda else 'shm or gloo'}"
        )
    return ParallelConfig(
        size,
        encoder,
        all_reduce,
        settings.step_timeout or (120.0 if cuda else 1200.0),
        expert_runs=runs,
    )
