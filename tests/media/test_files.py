"""Uploaded files on disk: kept once by content, whole or not at all, across restarts, within a
budget.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from saccade.core.errors import NotFound, TooLarge
from saccade.media.files import BLOCK, FileStore

DATA = b"some bytes"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path, 1 << 20)


def home(tmp_path: Path, data: bytes = DATA) -> Path:
    return tmp_path / blake3(data).hexdigest()


def test_nothing_is_written_before_the_first_upload(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", 1 << 20)
    assert store.entries() == []
    assert not (tmp_path / "files").exists()


def test_a_file_outlives_the_server_that_took_it(tmp_path: Path, store: FileStore) -> None:
    stored = store.save(DATA, "a.png", "vision", None)
    later = FileStore(tmp_path, 1 << 20)
    assert later.read(stored.id) == DATA
    assert later.find(stored.id) == stored
    assert (stored.name, stored.purpose, stored.nbytes, stored.expires) == (
        "a.png",
        "vision",
        len(DATA),
        None,
    )


def test_what_is_uploaded_is_its_owners_only(tmp_path: Path) -> None:
    FileStore(tmp_path / "files", 1 << 20).save(DATA, "a.png", "vision", None)
    paths = list(tmp_path.rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}


def test_equal_bytes_lie_on_disk_once_until_the_last_upload_of_them_is_deleted(
    tmp_path: Path, store: FileStore
) -> None:
    first, second = (store.save(DATA, name, "vision", None) for name in ("a", "b"))
    assert first.id != second.id
    assert len(list(tmp_path.glob("*/content"))) == 1
    store.delete(first.id)
    assert [stored.name for stored in store.entries()] == ["b"] and store.read(second.id) == DATA
    store.delete(second.id)
    assert not home(tmp_path).exists()
    for call in (store.find, store.read, store.delete):
        with pytest.raises(NotFound):
            call(second.id)


def test_entries_are_in_the_order_of_their_uploads(store: FileStore) -> None:
    ids = [store.save(bytes([n]), str(n), "vision", None).id for n in range(20)]
    assert [stored.id for stored in store.entries()] == ids


@pytest.mark.parametrize(
    "id",
    [
        "",
        "file-x",
        "file-../../etc/passwd",
        f"file-{'0' * 64}-00000000",
        f"file-{'0' * 64}-00000000\n",
    ],
)
def test_an_id_of_no_file_is_not_found(store: FileStore, id: str) -> None:
    with pytest.raises(NotFound):
        store.find(id)


@pytest.mark.parametrize("damage", [b"other byte", b"short", b""])
def test_content_that_the_disk_has_damaged_is_dropped_not_trusted(
    tmp_path: Path, store: FileStore, damage: bytes
) -> None:
    stored = store.save(DATA, "a", "vision", None)
    (home(tmp_path) / "content").write_bytes(damage)
    with pytest.raises(NotFound):
        store.read(stored.id)
    assert store.entries() == []
    again = store.save(DATA, "a", "vision", None)
    assert store.read(again.id) == DATA


def test_uploading_again_mends_damaged_content(tmp_path: Path, store: FileStore) -> None:
    stored = store.save(DATA, "a", "vision", None)
    (home(tmp_path) / "content").write_bytes(b"other byte")
    store.save(DATA, "b", "vision", None)
    assert store.read(stored.id) == DATA


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"id": 1}'])
def test_a_damaged_note_is_no_file_and_is_swept(
    tmp_path: Path, store: FileStore, note: bytes
) -> None:
    stored = store.save(DATA, "a", "vision", None)
    next(home(tmp_path).glob("*.json")).write_bytes(note)
    assert store.entries() == []
    with pytest.raises(NotFound):
        store.read(stored.id)
    store.save(b"another", "b", "vision", None)
    assert not home(tmp_path).exists()


def test_what_a_crash_left_half_written_is_swept_by_the_next_upload(
    tmp_path: Path, store: FileStore
) -> None:
    store.save(DATA, "a", "vision", None)
    (tmp_path / "incoming" / "half").write_bytes(b"ha")
    orphan = home(tmp_path, b"orphan")
    orphan.mkdir()
    (orphan / "content").write_bytes(b"orphan")
    store.save(b"another", "b", "vision", None)
    assert [stored.name for stored in store.entries()] == ["a", "b"]
    assert not list((tmp_path / "incoming").iterdir()) and not orphan.exists()


def test_the_budget_counts_content_once_and_refuses_what_is_over(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 14 * BLOCK)  # twice a folder, a content, and ten notes
    kept = [store.save(DATA, str(n), "vision", None) for n in range(9)]
    other = store.save(b"x" * 15, "x", "vision", None)
    with pytest.raises(TooLarge, match="--files-mb") as caught:
        store.save(b"y", "y", "vision", None)
    assert caught.value.code == "file_storage_full"
    assert len(store.entries()) == 10
    store.delete(other.id)
    store.save(b"y", "y", "vision", None)
    assert store.read(kept[0].id) == DATA


def test_an_expired_file_is_gone_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, 3 * BLOCK)
    stored = store.save(DATA, "a", "vision", 3600)
    assert stored.expires is not None and stored.expires == stored.created // 10**9 + 3600
    monkeypatch.setattr("saccade.media.files.time.time", lambda: stored.created / 1e9 + 3601)
    assert store.entries() == []
    with pytest.raises(NotFound):
        store.read(stored.id)
    assert store.save(b"y" * len(DATA), "b", "vision", None).name == "b"


def test_many_writers_in_two_stores_over_one_folder(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path, 1 << 20) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        saved = list(
            pool.map(
                lambda n: stores[n % 2].save(bytes([n % 5]) * 100, str(n), "vision", None),
                range(40),
            )
        )
        list(pool.map(lambda n: stores[(n + 1) % 2].delete(saved[n].id), range(0, 40, 2)))
    left = stores[0].entries()
    assert sorted(stored.name for stored in left) == sorted(str(n) for n in range(1, 40, 2))
    assert all(stores[1].read(stored.id) == bytes([int(stored.name) % 5]) * 100 for stored in left)
    assert json.loads(next(tmp_path.glob("*/*.json")).read_bytes())["purpose"] == "vision"
