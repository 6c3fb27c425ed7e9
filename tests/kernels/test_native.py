"""Where machine code is kept: with its user alone, or nowhere."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from saccade.core.private_folder import cache_folder
from saccade.kernels.x86.kept_files import keep, look, name_of, usable


def test_code_is_kept_where_only_its_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep("words", b"code")
    folder = tmp_path / "cache" / "saccade" / "code"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert look("words") == b"code" and usable()
    folder.chmod(0o777)
    assert look("words") is None and not usable(), "others could put theirs there"


def test_without_a_place_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep("words", b"code")
    assert look("words") is None and not usable()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    keep("words", b"code")
    assert look("words") is None and not usable()


def test_a_relative_cache_folder_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what a current folder holds is never taken for this user's code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert cache_folder("code") == Path.home() / ".cache" / "saccade" / "code"


@pytest.mark.parametrize("linked", ["code", "saccade"])
def test_files_of_other_names_are_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: str
) -> None:
    """Not through a link either, which the user has put in the folder's place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("saccade.kernels.x86.kept_files.MOST_BYTES", 150)
    photos = tmp_path / "photos"
    (photos / "code").mkdir(parents=True, mode=0o700)
    for folder in (photos, photos / "code"):
        folder.chmod(0o700)
        for name in ("holiday.jpg", name_of("a")[:-1], f"{name_of('a')}.jpg"):
            (folder / name).write_bytes(bytes(100))
    link = tmp_path / "cache" / "saccade" / ("code" if linked == "code" else "")
    link.parent.mkdir(parents=True)
    link.symlink_to(photos)
    before = sorted(path for path in photos.rglob("*") if path.is_file())
    for words in "abc":
        keep(words, bytes(100))
    after = {path for path in photos.rglob("*") if path.is_file()}
    assert after >= set(before)
    # A link for the folder itself is not followed; one above it is the user's own choice.
    assert {path.name for path in after - set(before)} <= {name_of(words) for words in "abc"}
    assert (linked == "code") == (after == set(before))
