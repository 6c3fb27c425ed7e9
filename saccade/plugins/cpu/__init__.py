"""Machine code for x86 processors, compiled by Numba and LLVM."""

from __future__ import annotations

from saccade.plugin import Plugin

PLUGIN = Plugin("cpu", backends=(("cpu", "saccade.plugins.cpu.backend:BACKEND"),))
