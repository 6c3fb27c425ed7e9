"""A scripted server's fixture."""

from tests.tools.conftest import server

__all__ = ["server"]
