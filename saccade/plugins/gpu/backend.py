"""Describes the backend for NVIDIA GPUs to start-up. Does not import PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

from saccade.core.config import MIB
from saccade.core.errors import ConfigError
from saccade.kernels.backend import KernelBackend
from saccade.plugins.gpu.libraries.installed import FA3_INSTALL, find_fa3, has_fa4

TOWER_ATTENTION = {9: "triton", 10: "triton"}
"""The attention backend that auto selects for the vision encoder, by the GPU's major architecture.
For others, it is flash. For 14,400 rows of 16 heads of 72, an H200 takes 4.1 ms with torch's kernel
and 2.7 with Saccade's. Blackwell has not been measured.
"""
FA3_SPEEDUP: Mapping[int, float] = {}
"""The speed of FlashAttention-3 on Hopper relative to Saccade's kernel, by the number of patches of
an image. It is printed as "fa3 beside ours" in stage `attention` of `saccade_bench.gpu_check`. If
all values are above 1, auto selects FlashAttention-3 where it is installed. Not measured yet.
"""
FLASH_LIKE = ("flash", "fa3", "fa4")
"""The attention backends that require a 16-bit dtype."""
TOWERS = ("triton", *FLASH_LIKE, "sdpa")


def pick_tower(wanted: str, arch: int, half: bool) -> str:
    """Return the attention backend of the vision encoder. auto selects the one that was fastest in
    measurements.

    Implements `kernels.backend.PickTower`.
    """
    option = f"--tune mm_attention_backend={wanted}"
    if wanted == "auto":
        if half and arch == 90 and min(FA3_SPEEDUP.values(), default=0.0) > 1 and find_fa3():
            return "fa3"
        ours = TOWER_ATTENTION.get(arch // 10)
        return ours or ("flash" if half else "sdpa")
    if wanted in FLASH_LIKE and not half:
        raise ConfigError(f"{option}: it needs a dtype of 16 bits")
    if wanted == "fa3" and (arch != 90 or find_fa3() is None):
        raise ConfigError(
            f"{option}: it needs a GPU of compute capability 9.0, and FlashAttention-3 "
            f"({FA3_INSTALL}); one of them is missing: use auto"
        )
    if wanted == "fa4" and not has_fa4():
        raise ConfigError(f"{option}: the package flash-attn-4 is not installed; use auto")
    return wanted


BACKEND = KernelBackend(
    ops="saccade.plugins.gpu.triton.ops:TritonOps",
    packages=("triton",),
    towers=TOWERS,
    pick_tower=pick_tower,
    # Saccade's workspace for FlashInfer, and FlashInfer's own 8 MiB of indices.
    workspaces={"flashinfer": 136 * MIB},
    step_graphs="saccade.plugins.gpu.cuda.step_graphs:open_step_graphs",
    pack_graphs="saccade.plugins.gpu.cuda.pack_graphs:CapturedPacks",
)
