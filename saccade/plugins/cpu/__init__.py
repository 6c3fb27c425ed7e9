"""Kernels for x86 CPUs, compiled by Numba and LLVM."""

from __future__ import annotations

from saccade.plugin import Plugin

PLUGIN = Plugin("cpu", backends=(("cpu", "saccade.plugins.cpu.backend:BACKEND"),))
