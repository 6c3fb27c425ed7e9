"""A path that cannot be read is refused in a sentence, without a wait and without a traceback."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.commands import run
from saccade.core.claims import check_folder
from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.given_paths import read_bytes, read_text, readable, reason, sendable, shown
from saccade.core.options import ModelOptions
from saccade.core.settings import KeySettings
from saccade.core.store import PAGES
from saccade.edge.auth import read_keys
from saccade.plugins.encoder.options import RoleOptions
from saccade.plugins.fetch.options import FetchOptions
from tests.helpers.paths import strange_paths

KINDS = ("long", "nul", "loop", "folder", "pipe", "device", "below a file", "surrogate")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_readable_file_is_refused_without_a_wait(tmp_path: Path, kind: str) -> None:
    path = Path(strange_paths(tmp_path)[kind])
    with pytest.raises((OSError, ValueError)):
        read_bytes(path, 100)
    if kind not in ("nul", "surrogate"):  # no command line has them
        with pytest.raises(ConfigError, match="--api-keys-file"):
            read_keys(path)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no disk, but would take memory
    with pytest.raises(OSError, match="bytes; the limit is"):
        read_text(path)
    path.write_text("few")
    assert read_text(path) == "few"


FILES: dict[str, Callable[[str], object]] = {
    "--chat-template": lambda name: ModelOptions(chat_template=name),
    "--api-keys-file": lambda name: KeySettings(name),
    "--encoders": lambda name: RoleOptions(role="language", encoders=(name,)),
}


@pytest.mark.parametrize("option", FILES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "below a file"])
def test_an_option_that_names_no_file_is_refused_by_its_name(
    tmp_path: Path, option: str, kind: str
) -> None:
    with pytest.raises(ConfigError, match=option):
        FILES[option](strange_paths(tmp_path)[kind])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
def test_an_option_that_names_no_folder_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    name = strange_paths(tmp_path)[kind]
    with pytest.raises(ConfigError, match="--allowed-local-media-path"):
        FetchOptions(allowed_local_media_path=name)
    with pytest.raises(ConfigError, match="--kv-cache-dir"):
        check_folder("--kv-cache-dir", name, PAGES)


def test_a_missing_file_is_left_to_who_reads_it(tmp_path: Path) -> None:
    assert ModelOptions(chat_template=str(tmp_path / "later")).chat_template


COMMANDS = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")


@COMMANDS
@pytest.mark.parametrize(
    "words",
    [
        ("chat", "what?", "--image", "PATH"),
        ("chat", "what?", "--base-url", "http://127.0.0.1:9", "--image", "PATH"),
        ("serve", "PATH"),
    ],
    ids=["chat", "chat with a server", "serve"],
)
@pytest.mark.parametrize("kind", ["long", "pipe", "device", "below a file"])
def test_a_command_says_in_a_sentence_which_path_it_cannot_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    kind: str,
) -> None:
    path = strange_paths(tmp_path)[kind]
    monkeypatch.setattr(sys, "argv", ["saccade", *(w.replace("PATH", path) for w in words)])
    try:
        status = run()
    except SystemExit as left:  # cyclopts' own refusal of a path that is not there
        status = int(left.code or 0)
    said = capsys.readouterr()
    assert status in (1, 2) and path[:60] in re.sub(r"[\s│]", "", said.out + said.err)


@COMMANDS
def test_a_word_that_is_not_utf8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["saccade", "serve", os.fsdecode(b"/models/\xff")])
    assert run() == 1
    assert "is not UTF-8" in capsys.readouterr().err


def test_an_error_of_the_disk_names_the_path_and_the_reason() -> None:
    with pytest.raises(CheckpointError, match=r"/a/b cannot be read: Input/output error"):
        with readable("/a"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), "/a/b")
    with pytest.raises(CheckpointError, match="/a cannot be read: Stale file handle"):
        with readable("/a"):
            raise OSError(errno.ESTALE, "Stale file handle")
    assert reason(ValueError()) == "ValueError"
    assert len(shown("a" * 5000)) < 400
    assert sendable("a\udcff").encode() == b"a\\udcff"
