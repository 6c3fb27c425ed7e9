"""Folders that this user alone may fill, whoever owns what is above them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from saccade.core.private_folder import PrivateFolder, cache_folder, private_folder

STRANGER = 12345
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


def refused(path: Path) -> str:
    with pytest.raises(OSError) as caught, private_folder(path):
        pass
    return str(caught.value)


def test_what_is_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    with private_folder(tmp_path / "a" / "b") as folder:
        folder.write("name", b"content")
        assert folder.read("name") == b"content"
        assert [name for name, _ in folder.entries()] == ["name"]
        folder.remove("name")
        assert folder.entries() == []


def test_a_folder_is_opened_once(tmp_path: Path) -> None:
    """Whatever comes in its place meanwhile is not read or written."""
    place = tmp_path / "place"
    with private_folder(place) as folder:
        folder.write("name", b"ours")
        place.rename(tmp_path / "away")
        place.mkdir(mode=0o700)
        (place / "name").write_bytes(b"theirs")
        assert folder.read("name") == b"ours"
        folder.write("other", b"ours")
    assert [path.name for path in place.iterdir()] == ["name"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "folder" / "name"
    path.parent.mkdir(mode=0o700)
    (tmp_path / "secret").write_bytes(b"secret")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "secret")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with private_folder(path.parent) as folder, pytest.raises(OSError):
        folder.read("name")


@root_only
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_below_another_users_is_refused(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a" / "b" / "c"
    path.mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    with private_folder(path):
        pass
    os.chown((path, *path.parents)[depth], STRANGER, STRANGER)
    assert "is owned by another user" in refused(path)


@root_only
def test_a_link_of_another_user_is_refused_and_ones_own_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("real/../real")
    with private_folder(link / "folder") as folder:
        folder.write("name", b"content")
    assert (tmp_path / "real" / "folder" / "name").exists()
    refused(link)  # which is no folder itself
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert "is owned by another user" in refused(link / "folder")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refused(tmp_path / "a" / "folder")


@pytest.mark.parametrize(
    ("mode", "works"), [(0o755, True), (0o777, False), (0o772, False), (0o1777, True)]
)
def test_a_parent_that_all_may_write_to_keeps_what_is_ours_if_it_is_sticky(
    tmp_path: Path, mode: int, works: bool
) -> None:
    """As /tmp is. The folder itself is never one of those."""
    path = tmp_path / "parent" / "folder"
    path.mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    path.parent.chmod(mode)
    if works:
        with private_folder(path) as folder:
            assert isinstance(folder, PrivateFolder)
    else:
        assert "other users can write to parent" in refused(path)
    path.parent.chmod(0o700)
    path.chmod(mode)
    if mode == 0o755:
        with private_folder(path):
            pass
    else:
        assert "other users can write to folder" in refused(path)


def test_a_relative_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not absolute" in refused(Path("folder"))
    assert not (tmp_path / "folder").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "./cache")
    assert cache_folder("x").is_absolute()


@root_only
def test_a_parent_need_not_be_readable() -> None:
    """As /home often is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        home = Path(root, "home")
        home.mkdir(mode=0o700)
        os.chown(home, STRANGER, STRANGER)
        Path(root).chmod(0o711)
        os.seteuid(STRANGER)
        try:
            with private_folder(home / "cache") as folder:
                folder.write("name", b"content")
                assert folder.read("name") == b"content"
        finally:
            os.seteuid(0)
