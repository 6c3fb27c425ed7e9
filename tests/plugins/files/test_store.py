"""Uploaded files on disk: kept once by content, whole or not at all, across restarts, within a
budget.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from saccade.core.errors import InvalidRequest, NotFound, StorageBusy, StorageFull, TooLarge
from saccade.plugins.files.store import BLOCK, FileStore, Stored
from saccade.plugins.files.uploads import Uploads

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
    (tmp_path / "incoming" / ("0" * 16)).write_bytes(b"ha")
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
    with pytest.raises(TooLarge, match="--files-dir FOLDER:SIZE") as caught:
        store.save(b"y", "y", "vision", None)
    assert caught.value.code == "file_storage_full"
    assert len(store.entries()) == 10
    store.delete(other.id)
    store.save(b"y", "y", "vision", None)
    assert store.read(kept[0].id) == DATA


def on_disk(folder: Path) -> int:
    """What `du` says of everything that uploads put there."""
    paths = [path for path in folder.rglob("*") if path.name not in ("incoming", "lock")]
    return sum(max(BLOCK, path.stat().st_blocks * 512) for path in paths)


def test_the_budget_counts_all_that_lies_on_disk(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1 << 20)
    kept: list[Any] = []
    with pytest.raises(TooLarge, match="--files-dir FOLDER:SIZE"):
        while len(kept) < 1000:
            kept.append(store.save(str(len(kept)).encode(), "n" * 200, "vision", None))
    assert len(kept) == (1 << 20) // (3 * BLOCK), "a folder, a content and a note for each"
    assert on_disk(tmp_path) <= 1 << 20
    for stored in kept[:3]:
        store.delete(stored.id)
    assert FileStore(tmp_path, 1 << 20).save(bytes(2 * BLOCK), "x", "vision", None)


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.plugins.files.store.MAX_FILES", 3)
    store = FileStore(tmp_path, 1 << 20)
    for n in range(3):
        store.save(DATA, str(n), "vision", None)
    with pytest.raises(TooLarge, match="3 files are stored"):
        store.save(DATA, "x", "vision", None)


def test_an_upload_and_a_list_do_not_read_the_notes_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reads = FileStore(tmp_path, 1 << 20), 0
    parse = FileStore._parse

    def counted(self: FileStore, path: Path) -> Stored | None:
        nonlocal reads
        reads += 1
        return parse(self, path)

    monkeypatch.setattr(FileStore, "_parse", counted)
    for n in range(30):
        store.save(str(n).encode(), str(n), "vision", None)
    assert reads == 0
    assert len(store.entries()) == 30 and reads == 30
    store.save(b"one more", "30", "vision", None)
    assert len(store.entries()) == 31 and reads == 31


def test_what_others_do_to_the_folder_is_counted(tmp_path: Path) -> None:
    one, other = (FileStore(tmp_path, 6 * BLOCK) for _ in range(2))
    first = one.save(b"1", "1", "vision", None)
    other.save(b"2", "2", "vision", None)
    with pytest.raises(TooLarge):
        one.save(b"3", "3", "vision", None)
    other.delete(first.id)
    one.save(b"3", "3", "vision", None)
    shutil.rmtree(home(tmp_path, b"2"))  # by hand
    other.save(b"4", "4", "vision", None)


def test_each_owner_sees_its_own_files(store: FileStore) -> None:
    mine, yours = (store.save(DATA, name, "vision", None, name) for name in ("me", "you"))
    assert [stored.name for stored in store.entries("me")] == ["me"]
    assert store.entries() == []
    for call in (store.find, store.read, store.delete):
        with pytest.raises(NotFound):
            call(mine.id, "you")
    store.delete(mine.id, "me")
    assert store.read(yours.id, "you") == DATA, "equal bytes of two owners are two files"


def test_one_of_several_owners_may_fill_its_share_only(tmp_path: Path) -> None:
    budget = 24 * BLOCK  # four uploads with a folder, a content and a note for each, and a half
    store = FileStore(tmp_path, budget)
    kept = [store.save(DATA + bytes([n]), "a", "vision", None, "me", 0.5) for n in range(4)]
    with pytest.raises(TooLarge, match=r"this key's 4 files .* 50%.*--files-dir") as caught:
        store.save(b"one more", "a", "vision", None, "me", 0.5)
    assert caught.value.code == "file_storage_full"
    with pytest.raises(TooLarge, match="this key's 4 files"):
        store.save(DATA + bytes([0]), "a", "vision", None, "me", 0.5)  # though it is there
    for n in range(4):
        store.save(DATA + bytes([n]), "b", "vision", None, "you", 0.5)
    (tmp_path / "lock").write_bytes(b"")  # another start, which counts anew
    again = FileStore(tmp_path, budget)
    with pytest.raises(TooLarge, match="this key's 4 files"):
        again.save(b"one more", "a", "vision", None, "me", 0.5)
    again.delete(kept[0].id, "me")
    assert again.save(b"one more", "a", "vision", None, "me", 0.5)
    assert again.save(b"yet one", "a", "vision", None, "nobody's share"), "one key has all of it"


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "r+b")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


async def test_a_lock_held_elsewhere_holds_up_only_those_who_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.plugins.files.store.LOCK_SECONDS", 0.3)
    files = Uploads(FileStore(tmp_path, 1 << 20))
    kept = await files.save(DATA, "a", "vision", None)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        async with asyncio.timeout(10):  # 50 turns at the lock would take longer
            uploads = [
                asyncio.create_task(files.save(bytes([n]), "b", "vision", None)) for n in range(50)
            ]
            await asyncio.sleep(0.05)
            assert await asyncio.to_thread(lambda: 7) == 7
            assert await files.read(kept.id) == DATA and len(await files.entries()) == 1
            assert not any(task.done() for task in uploads), "they still wait for the lock"
            refused = await asyncio.gather(*uploads, return_exceptions=True)
            assert {type(each) for each in refused} == {StorageBusy}
        holder.stdin.close()
        holder.wait()
    await asyncio.sleep(0.3)
    assert (await files.save(b"b", "b", "vision", None)).name == "b"
    files.close()


async def test_a_folder_that_does_not_answer_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.plugins.files.uploads.PATIENCE", 0.1)
    away = threading.Event()  # a file server that is away blocks in the kernel
    monkeypatch.setattr(FileStore, "entries", lambda self, owner: away.wait())
    files = Uploads(FileStore(tmp_path, 1 << 20))
    lists = [asyncio.create_task(files.entries()) for _ in range(20)]
    for each in await asyncio.gather(*lists, return_exceptions=True):
        assert isinstance(each, StorageBusy)
    away.set()
    files.close()


FULL = """
import resource, sys
from pathlib import Path
from saccade.core.errors import StorageFull
from saccade.plugins.files.store import FileStore
store = FileStore(Path(sys.argv[1]), 1 << 20)
kept = store.save(b"kept", "kept", "vision", None)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    store.save(bytes(60_000), "x", "vision", None)
except StorageFull as error:
    assert error.status == 507, error.status
    print(error.message)
assert store.read(kept.id) == b"kept"
assert [stored.name for stored in store.entries()] == ["kept"]
store.save(b"small", "small", "vision", None)
"""


def test_a_disk_that_does_not_take_an_upload_is_said_to_be_so(tmp_path: Path) -> None:
    """The kernel itself refuses, past a limit of file sizes."""
    told = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "--files-dir" in told.stdout and "File too large" in told.stdout
    assert not list((tmp_path / "incoming").iterdir())
    assert len(list(tmp_path.glob("*/content"))) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync"])
def test_whatever_the_disk_refuses_is_one_typed_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    """Where the operating system's answer cannot be had (tests may run as root), it is put in its
    mouth.
    """
    store = FileStore(tmp_path, 1 << 20)
    kept = store.save(DATA, "a", "vision", None)
    real = getattr(os, call)

    def refuse(*arguments: object, **options: object) -> object:
        flags = arguments[1] if call == "open" else os.O_WRONLY
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(os, call, refuse)
        with pytest.raises(StorageFull, match=os.strerror(number)):
            store.save(b"another", "b", "vision", None)
        assert store.read(kept.id) == DATA
    assert [stored.name for stored in store.entries()] == ["a"]
    store.save(b"another", "b", "vision", None)
    assert not list((tmp_path / "incoming").iterdir())


def test_a_file_that_is_a_folder_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "files").write_bytes(b"")
    store = FileStore(tmp_path / "files", 1 << 20)
    with pytest.raises(StorageFull, match="--files-dir"):
        store.save(DATA, "a", "vision", None)
    with pytest.raises(StorageBusy, match="--files-dir"):
        store.entries()


def test_an_expired_file_is_gone_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, 3 * BLOCK)
    stored = store.save(DATA, "a", "vision", 3600)
    assert stored.expires is not None and stored.expires == stored.created // 10**9 + 3600
    monkeypatch.setattr(
        "saccade.plugins.files.store.time.time", lambda: stored.created / 1e9 + 3601
    )
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


def test_an_upload_to_several_servers_has_one_id_and_is_kept_once_where_they_share(
    tmp_path: Path,
) -> None:
    stores = [FileStore(tmp_path, 1 << 20) for _ in range(2)]
    one, other = (
        store.save(b"data", "a", "vision", None, "me", 1.0, "0badcafe") for store in stores
    )
    assert one == other and one.id.endswith("-0badcafe")
    assert len(stores[0].entries("me")) == 1
    with pytest.raises(InvalidRequest):
        stores[1].save(b"data", "b", "vision", None, "another", 1.0, "0badcafe")
    assert stores[0].read(one.id, "me") == b"data"
    used = json.loads((tmp_path / "lock").read_text())
    assert used["files"] == 1 == used["owners"]["me"][1]


def test_a_folder_that_somebody_else_uses_is_refused_and_nothing_in_it_is_touched(
    tmp_path: Path,
) -> None:
    """Also one whose own folders have names as ours."""
    for name in ("incoming", "0" * 64):
        (tmp_path / name).mkdir()
        (tmp_path / name / "holiday.png").write_bytes(DATA)
    (tmp_path / "thesis.txt").write_bytes(DATA)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageFull, match=r"contains 'thesis.txt' but no .saccade-files"):
        FileStore(tmp_path, 1 << 20).save(DATA, "a", "vision", None)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_others_put_beside_ours_is_let_be_and_holds_up_nobody(
    tmp_path: Path, store: FileStore
) -> None:
    stored = store.save(DATA, "a", "vision", None)
    strangers = [tmp_path / "incoming" / "holiday.png", home(tmp_path) / "notes.txt"]
    for stranger in strangers:
        stranger.write_bytes(DATA)
    os.mkfifo(home(tmp_path) / "00000000.json")
    (tmp_path / ("0" * 64)).write_bytes(b"")
    (tmp_path / ("1" * 64)).symlink_to(tmp_path.parent)
    again = FileStore(tmp_path, 1 << 20)
    assert [each.id for each in again.entries()] == [stored.id]
    again.save(b"another", "b", "vision", None)
    again.delete(stored.id)
    assert all(stranger.exists() for stranger in strangers)
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to(strangers[0])
    with pytest.raises(StorageFull, match="lock is not a regular file owned by this user"):
        again.save(b"third", "c", "vision", None)
    assert strangers[0].read_bytes() == DATA
