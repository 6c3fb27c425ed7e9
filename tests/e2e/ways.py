"""The ways a server is asked in tests: itself, or through a router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from saccade_bench.fixtures.server import Server, routing

WAYS = ("direct", pytest.param("routed", marks=pytest.mark.slow))
"""How a server is asked."""


TOWER = (
    *("--tune", "mm_attention_backend=sdpa", "--tune", "max_encode_patches=64"),
    *("--disable-cuda-graph", "--family-option", "patch_embed=folded"),
)
"""Options of the encoder of images that change no answer."""
KEY = "key"
"""Of the shared server that asks for one."""
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Routed(Server):
    """A server that is asked through a router: all but the address is the server's own."""

    behind: Server = field(kw_only=True)

    def metric(self, name: str, **labels: str) -> float:
        return self.behind.metric(name, **labels)


@contextmanager
def perhaps_routed(server: Server, way: str, folder: Path, *options: str) -> Iterator[Server]:
    """`server`, asked itself where `way` is "direct", else through a router."""
    if way == "direct":
        yield server
        return
    with routing([server], folder, *options) as router:
        yield Routed(router.url, server.process, server.log, server.key, behind=server)
