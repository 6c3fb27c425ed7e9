"""Fixtures shared by the tests of the tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.server import Script, ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A scripted server; tests set `server.script` before they ask."""
    with ScriptedServer(Script()) as running:
        yield running
