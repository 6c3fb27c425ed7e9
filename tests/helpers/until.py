"""Waiting for a condition in a test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SECONDS = 60
"""More than a busy machine needs."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)
