"""Kernels for x86 CPUs, compiled by Numba and LLVM."""

from __future__ import annotations

from saccade.plugin import Plugin, Runtime

PLUGIN = Plugin("cpu", runtime=Runtime(backends=(("cpu", "saccade.plugins.cpu.backend:BACKEND"),)))
