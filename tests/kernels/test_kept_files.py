"""Files that one process makes and later ones find: whole, or not at all, and never too many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from saccade.kernels.x86 import kept_files
from saccade.kernels.x86.kept_files import kept, look, name_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "saccade" / "code"


@pytest.mark.parametrize("harm", ["torn", "empty", "changed", "another's", "unreadable"])
def test_what_is_not_whole_is_made_again(folder: Path, harm: str) -> None:
    made: list[str] = []

    def once(words: str) -> bytes:
        return kept(words, lambda: made.append(words) or b"the code of " + words.encode())

    assert once("a") == once("a") == b"the code of a"
    once("b")
    assert made == ["a", "b"]
    file = folder / name_of("a")
    whole = file.read_bytes()
    match harm:
        case "torn":
            file.write_bytes(whole[:-1])
        case "empty":
            file.write_bytes(b"")
        case "changed":
            file.write_bytes(whole[:-1] + b"!")
        case "another's":
            file.write_bytes((folder / name_of("b")).read_bytes())
        case _:
            file.unlink()
            file.mkdir()
    assert look("a") is None
    assert once("a") == b"the code of a"
    assert made == ["a", "b", "a"]


def test_what_was_used_longest_ago_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = kept_files.DIGEST_BYTES + 100
    monkeypatch.setattr(kept_files, "MOST_BYTES", 3 * each)
    for number, words in enumerate(("a", "b", "c")):
        kept(words, lambda: bytes(100))
        os.utime(folder / name_of(words), (number, number))
    assert look("a") is not None, "used now"
    kept("d", lambda: bytes(100))
    assert [look(words) is not None for words in "abcd"] == [True, False, True, True]
    assert sum(file.stat().st_size for file in folder.iterdir()) == 3 * each
