"""Files that one process makes and later ones find: whole, or not at all, and never too many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.plugins.cpu import disk_cache
from saccade.plugins.cpu.disk_cache import file_name, get_or_create, load


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "saccade" / "code"


@pytest.mark.parametrize("harm", ["torn", "empty", "changed", "another's", "unreadable"])
def test_what_is_not_whole_is_made_again(folder: Path, harm: str) -> None:
    made: list[str] = []

    def once(words: str) -> bytes:
        return get_or_create(words, lambda: made.append(words) or b"the code of " + words.encode())

    assert once("a") == once("a") == b"the code of a"
    once("b")
    assert made == ["a", "b"]
    file = folder / file_name("a")
    whole = file.read_bytes()
    match harm:
        case "torn":
            file.write_bytes(whole[:-1])
        case "empty":
            file.write_bytes(b"")
        case "changed":
            file.write_bytes(whole[:-1] + b"!")
        case "another's":
            file.write_bytes((folder / file_name("b")).read_bytes())
        case _:
            file.unlink()
            file.mkdir()
    assert load("a") is None
    assert once("a") == b"the code of a"
    assert made == ["a", "b", "a"]


def test_what_was_used_longest_ago_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = disk_cache.DIGEST_BYTES + 100
    monkeypatch.setattr(disk_cache, "MAX_BYTES", 3 * each)
    for number, words in enumerate(("a", "b", "c")):
        get_or_create(words, lambda: bytes(100))
        os.utime(folder / file_name(words), (number, number))
    assert load("a") is not None, "used now"
    get_or_create("d", lambda: bytes(100))
    assert [load(words) is not None for words in "abcd"] == [True, False, True, True]
    assert sum(file.stat().st_size for file in folder.iterdir()) == 3 * each


MAKER = """
import sys, time
from pathlib import Path
from saccade.plugins.cpu.disk_cache import get_or_create

def make():
    with log.open("a") as file:
        file.write("made ")
    print("making", flush=True)
    while not go.exists():
        time.sleep(0.01)
    return b"the code"

log, go = map(Path, sys.argv[1:])
print("asking", flush=True)
print(get_or_create("words", make).decode(), flush=True)
"""


def begin_maker(log: Path, go: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(log), str(go)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(maker: subprocess.Popen[str]) -> str:
    assert maker.stdout is not None
    return maker.stdout.readline().strip()


def test_what_two_processes_want_at_once_is_made_once(folder: Path, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    with begin_maker(log, go) as first:
        assert [said(first), said(first)] == ["asking", "making"]
        with begin_maker(log, go) as second:
            assert said(second) == "asking"
            go.touch()
            assert said(first) == said(second) == "the code"
    assert log.read_text() == "made "
    assert {file.name for file in folder.iterdir()} == {file_name("words"), disk_cache.LOCK_FILE}


def test_a_maker_that_is_killed_leaves_no_lock_and_no_file(folder: Path, tmp_path: Path) -> None:
    with begin_maker(tmp_path / "log", tmp_path / "go") as maker:
        assert [said(maker), said(maker)] == ["asking", "making"]
        maker.kill()
        assert get_or_create("words", lambda: b"ours") == b"ours"
    assert {file.name for file in folder.iterdir()} == {file_name("words"), disk_cache.LOCK_FILE}


def test_where_nothing_can_be_kept_each_makes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    made: list[str] = []
    for _ in range(2):
        assert get_or_create("words", lambda: made.append("words") or b"the code") == b"the code"
    assert made == ["words", "words"]
