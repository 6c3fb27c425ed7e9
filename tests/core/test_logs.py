"""The log's lines, as a process writes them to its stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys
from saccade.core.logs import configure_logging
configure_logging(sys.argv[1])
logging.getLogger("saccade").warning('two\\n"lines" of %s', "text")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("saccade").exception("failed")
"""
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


def log(path: Path, log_format: str, journal: str = "") -> str:
    """What a process logs to a file. journal: its JOURNAL_STREAM; {} is the file itself."""
    with path.open("wb") as stderr:
        found = os.fstat(stderr.fileno())
        stream = journal.format(f"{found.st_dev}:{found.st_ino}")
        subprocess.run(
            [sys.executable, "-c", PROGRAM, log_format],
            env={**os.environ, "JOURNAL_STREAM": stream},
            stderr=stderr,
            check=True,
        )
    return path.read_text()


@pytest.mark.parametrize("journal", ["", "1:1"])
def test_lines_of_text_begin_with_the_time(tmp_path: Path, journal: str) -> None:
    text = log(tmp_path / "log", "text", journal)
    assert re.match(rf'{TIME}WARNING saccade: two\n"lines" of text\n{TIME}ERROR saccade: ', text)


def test_the_journal_adds_the_time_itself(tmp_path: Path) -> None:
    assert log(tmp_path / "log", "text", "{}").startswith("WARNING saccade: two\n")


def test_json_has_one_object_a_line(tmp_path: Path) -> None:
    warning, error = map(json.loads, log(tmp_path / "log", "json", "{}").splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", warning.pop("time"))
    assert warning == {"level": "warning", "logger": "saccade", "message": 'two\n"lines" of text'}
    assert error["message"] == "failed" and "ZeroDivisionError" in error["exception"]
