"""The fixtures of families' tests."""

from __future__ import annotations

from tests.families.conftest import changed, refused

__all__ = ["changed", "refused"]
