"""A folder of KV pages that others reach into: the answers are transformers', nothing is waited
for, and each page that is not read is counted.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path

import pytest

from saccade.core.errors import StartupError
from saccade.core.plan import PageOutcome
from saccade.core.store import identity_folder
from tests.families.answers import Model
from tests.fixtures.harness import Harness
from tests.plugins.tiers.test_kept_answers import MODEL, evict, files, kept, open_engine, run

STRANGER = 65_534
DEVICES = ("zeros without end", "a disk")
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes such a file")


@pytest.fixture(scope="module")
def model(answered: Callable[[str], Model]) -> Model:
    return answered("qwen3_vl")


def put(path: Path, what: str) -> None:
    """In place of a page."""
    data = path.read_bytes()
    path.unlink()
    match what:
        case "a hole" | "a hole of a terabyte":
            path.touch()
            os.truncate(path, len(data) if what == "a hole" else 1 << 40)
        case "a hole below its header":
            path.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
            os.truncate(path, len(data))
        case "another user's":
            path.write_bytes(data)
            os.chown(path, STRANGER, STRANGER)
        case "zeros without end" | "a disk":
            kind, device = (stat.S_IFCHR, (1, 5)) if what[0] == "z" else (stat.S_IFBLK, (7, 200))
            os.mknod(path, kind | 0o666, os.makedev(*device))
        case "a socket":
            with chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
        case "a link":
            elsewhere = path.parent.parent / path.name
            elsewhere.write_bytes(data)
            path.symlink_to(elsewhere)


PUT: Mapping[str, PageOutcome] = {
    "a hole": "damaged",
    "a hole of a terabyte": "damaged",
    "a hole below its header": "damaged",
    "another user's": "not read",
    "zeros without end": "damaged",
    "a disk": "damaged",
    "a socket": "damaged",
    "a link": "damaged",
}


@pytest.mark.first
@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        pytest.param(what, outcome, marks=ROOT if what in ("another user's", *DEVICES) else ())
        for what, outcome in PUT.items()
    ],
)
def test_what_stands_in_place_of_pages_is_not_believed(
    model: Model, tmp_path: Path, what: str, outcome: PageOutcome
) -> None:
    first = open_engine(model, tmp_path)
    run(first, model)
    first.close()
    again = open_engine(model, tmp_path)
    for path in files(tmp_path):
        put(path, what)
    assert {each.cached_tokens for each in run(again, model).values()} == {0}
    found = Counter(kept(again).counts)
    assert found[outcome] > 0 and found["read"] == 0
    again.close()
    third = open_engine(model, tmp_path)
    run(third, model)
    third.close()


@pytest.mark.first
@pytest.mark.parametrize("what", ["a hole of a terabyte", "a hole"])
def test_a_hole_that_is_there_at_the_start_is_not_believed(
    model: Model, tmp_path: Path, what: str
) -> None:
    first = open_engine(model, tmp_path)
    run(first, model)
    first.close()
    found = files(tmp_path)
    for path in found[::2]:
        put(path, what)
    again = open_engine(model, tmp_path)
    run(again, model)
    again.close()
    third = open_engine(model, tmp_path)
    assert sum(path.stat().st_blocks * 512 for path in files(tmp_path)) <= 1 << 30
    run(third, model)
    assert kept(third).counts["damaged"] == 0
    third.close()


def test_a_link_in_place_of_an_identitys_folder_is_refused(model: Model, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    open_engine(model, root).close()
    name = root / identity_folder(MODEL)
    name.rename(elsewhere)
    shutil.rmtree(elsewhere)
    elsewhere.mkdir()
    name.symlink_to(elsewhere)
    with pytest.raises(StartupError, match="is not a directory"):
        open_engine(model, root)
    assert list(elsewhere.iterdir()) == []


@ROOT
def test_another_users_folder_is_refused(model: Model, tmp_path: Path) -> None:
    """Who owns it can put any page there, checksum and all."""
    open_engine(model, tmp_path).close()
    os.chown(tmp_path / identity_folder(MODEL), STRANGER, STRANGER)
    with pytest.raises(StartupError, match="belongs to another user"):
        open_engine(model, tmp_path)


@pytest.mark.parametrize("what", ["a pipe", "a folder", "a link"])
def test_what_stands_in_place_of_the_lock_is_refused(
    model: Model, tmp_path: Path, what: str
) -> None:
    open_engine(model, tmp_path).close()
    lock = tmp_path / identity_folder(MODEL) / "lock"
    lock.unlink()
    match what:
        case "a pipe":
            os.mkfifo(lock)
        case "a folder":
            lock.mkdir()
        case "a link":
            lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="lock is not a regular file"):
        open_engine(model, tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def until_counted(engine: Harness, model: Model, outcome: PageOutcome) -> None:
    """A thread tells, with a later step."""
    deadline = time.monotonic() + 20
    while not kept(engine).counts[outcome]:
        assert time.monotonic() < deadline
        run(engine, model)
        evict(engine)


def test_a_link_that_takes_the_folders_place_is_not_written_through(
    model: Model, tmp_path: Path
) -> None:
    root, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    engine = open_engine(model, root, kv_pages=40)
    run(engine, model)
    name = root / identity_folder(MODEL)
    name.rename(tmp_path / "aside")
    elsewhere.mkdir()
    name.symlink_to(elsewhere)
    until_counted(engine, model, "not saved")
    engine.close()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.more
def test_two_servers_in_a_folder_that_was_swapped_are_both_right(
    model: Model, tmp_path: Path
) -> None:
    """The first one's lock went with the folder that it has locked; in the new one each page's
    file is another's, until one of the two has found that out and written the page.
    """
    one = open_engine(model, tmp_path, kv_pages=40)
    run(one, model)
    evict(one)
    folder, aside = tmp_path / identity_folder(MODEL), tmp_path / "aside"
    until_counted(one, model, "read")
    folder.rename(aside)
    folder.mkdir(mode=0o700)
    names = [path for path in aside.iterdir() if path.suffix == ".page"]
    for path, other in zip(names, names[1:] + names[:1], strict=True):
        shutil.copy(path, folder / other.name)
    aside.rename(tmp_path.parent / f"{tmp_path.name} aside")
    other_one = open_engine(model, tmp_path, kv_pages=40)
    for _ in range(3):
        for engine in (other_one, one):
            run(engine, model)
            evict(engine)
    assert kept(other_one).counts["damaged"] > 0 and kept(one).counts["read"] > 0
    one.close()
    other_one.close()


@pytest.mark.more
@pytest.mark.parametrize("years", [-80, 200])
def test_a_clock_that_was_put_back_costs_no_page(model: Model, tmp_path: Path, years: int) -> None:
    first = open_engine(model, tmp_path)
    run(first, model)
    warm = run(first, model)
    first.close()
    then = int(time.time()) + years * 365 * 86_400
    for path in files(tmp_path)[::2]:
        os.utime(path, (then, then))
    again = open_engine(model, tmp_path)
    for name, outcome in warm.items():
        assert run(again, model, name)[name].cached_tokens == outcome.cached_tokens
    assert kept(again).counts["damaged"] == kept(again).counts["missing"] == 0
    again.close()
    small = open_engine(model, tmp_path, disk_bytes=40_000)
    run(small, model)
    small.close()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 40_000
