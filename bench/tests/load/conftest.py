"""The scripted server that the chat tests use too."""

from __future__ import annotations

from tests.tools.conftest import server

__all__ = ["server"]
