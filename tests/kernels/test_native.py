"""Where machine code is kept: with its user alone, or nowhere."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from saccade.kernels.x86.kept_files import code_folder


def test_code_is_kept_where_only_its_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = code_folder("code")
    assert folder == tmp_path / "cache" / "saccade" / "code"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert code_folder("code") is None, "others could put theirs there"


def test_without_a_place_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert code_folder("code") is None

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert code_folder("code") is None
