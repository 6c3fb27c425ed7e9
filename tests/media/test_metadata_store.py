"""Cards of files: typed, bounded, kept in a folder of our own, and never in anybody's way."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from saccade.media import metadata_store
from saccade.media.content import Probe
from saccade.media.file_cache import MetadataCache
from saccade.media.metadata_store import MetadataStore

PROBE = Probe("VIDEO", 64, 96, "mov h264", 1, 48, 8.0)


def found(folder: Path, name: bytes, kind: str = "video 1") -> Probe | None:
    """By a server that has just begun."""

    async def look() -> Probe | None:
        disk = MetadataStore(folder)
        try:
            return await MetadataCache(disk, kind, Probe).find(name)
        finally:
            disk.close()

    return asyncio.run(look())


def put(folder: Path, *names: bytes) -> None:
    disk = MetadataStore(folder)
    for name in names:
        MetadataCache(disk, "video 1", Probe).put(name, PROBE)
    disk.close()


def test_metadata_outlives_its_server(tmp_path: Path) -> None:
    put(tmp_path / "cards", b"name")
    assert found(tmp_path / "cards", b"name") == PROBE
    assert found(tmp_path / "cards", b"other") is None
    assert found(tmp_path / "cards", b"name", "video 2") is None, "of another decoder"


def test_the_oldest_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_store, "MAX_ENTRIES", 4)
    monkeypatch.setattr(metadata_store, "SWEEP", 1)
    names = [bytes([k]) for k in range(9)]
    put(tmp_path, *names)
    there = [name for name in names if found(tmp_path, name)]
    assert there == names[-4:]


def test_damaged_metadata_is_none(tmp_path: Path) -> None:
    put(tmp_path, b"name", b"whole")
    with closing(sqlite3.connect(tmp_path / "cards.db")) as database, database:
        database.execute("UPDATE cards SET card = ? WHERE name = ?", (b"\xc1junk", b"name"))
    assert found(tmp_path, b"name") is None
    assert found(tmp_path, b"whole") == PROBE


@pytest.mark.parametrize("damage", ["junk", "a link", "a stranger", "no folder"])
def test_a_folder_that_will_not_do_costs_openings_alone(tmp_path: Path, damage: str) -> None:
    folder, other = tmp_path / "cards", tmp_path / "other"
    other.write_bytes(b"somebody's" * 999)
    if damage == "no folder":
        folder.write_bytes(b"")
    else:
        folder.mkdir()
    if damage == "junk":
        put(folder, b"name")
        (folder / "cards.db").write_bytes(b"junk" * 4096)
    elif damage == "a link":
        (folder / "cards.db").symlink_to(other)
    elif damage == "a stranger":
        (folder / "somebody.txt").write_bytes(b"")
    put(folder, b"name")
    assert found(folder, b"name") is None
    assert other.read_bytes() == b"somebody's" * 999


async def test_without_a_folder_metadata_is_in_memory_alone() -> None:
    shelf = MetadataCache(None, "video 1", Probe)
    assert await shelf.find(b"name") is None
    shelf.put(b"name", PROBE)
    assert await shelf.find(b"name") == PROBE == shelf.get(b"name")
