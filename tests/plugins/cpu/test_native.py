"""Where machine code is kept: with its user alone, or nowhere."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from saccade.core.private_folder import cache_folder
from saccade.plugins.cpu.disk_cache import file_name, is_writable, load, store


def test_code_is_kept_where_only_its_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store("words", b"code")
    folder = tmp_path / "cache" / "saccade" / "code"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert load("words") == b"code" and is_writable()
    folder.chmod(0o777)
    assert load("words") is None and not is_writable(), "others could put theirs there"


def test_without_a_place_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store("words", b"code")
    assert load("words") is None and not is_writable()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    store("words", b"code")
    assert load("words") is None and not is_writable()


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
    monkeypatch.setattr("saccade.plugins.cpu.disk_cache.MAX_BYTES", 150)
    photos = tmp_path / "photos"
    (photos / "code").mkdir(parents=True, mode=0o700)
    for folder in (photos, photos / "code"):
        folder.chmod(0o700)
        for name in ("holiday.jpg", file_name("a")[:-1], f"{file_name('a')}.jpg"):
            (folder / name).write_bytes(bytes(100))
    link = tmp_path / "cache" / "saccade" / ("code" if linked == "code" else "")
    link.parent.mkdir(parents=True)
    link.symlink_to(photos)
    before = sorted(path for path in photos.rglob("*") if path.is_file())
    for words in "abc":
        store(words, bytes(100))
    after = {path for path in photos.rglob("*") if path.is_file()}
    assert after >= set(before)
    # A link for the folder itself is not followed; one above it is the user's own choice.
    assert {path.name for path in after - set(before)} <= {file_name(words) for words in "abc"}
    assert (linked == "code") == (after == set(before))
