"""Kernels and CUDA graphs for NVIDIA GPUs."""

from __future__ import annotations

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "gpu",
    options="saccade.core.settings:CudaSettings",
    backends=(("cuda", "saccade.plugins.gpu.backend:BACKEND"),),
)
