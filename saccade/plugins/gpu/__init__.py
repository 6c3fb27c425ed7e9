"""Kernels and CUDA graphs for NVIDIA GPUs."""

from __future__ import annotations

from saccade.plugin import Plugin, Runtime

PLUGIN = Plugin(
    "gpu",
    options="saccade.core.settings:CudaSettings",
    runtime=Runtime(backends=(("cuda", "saccade.plugins.gpu.backend:BACKEND"),)),
)
