from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make processes that a test kills leave their folders where pytest removes them."""
    folder: Path = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
