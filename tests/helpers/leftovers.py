"""A pytest plugin: a session has a folder of its own for temporary files, and fails by name if
anything is left there at its end.

Knows nothing of who leaves what.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

KEPT = ("torchinductor_*",)
"""Names of what libraries keep for their next run."""
FOLDER = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of the session one folder; pytest's own folders stay where they are."""
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which inherits the folder
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="saccade-tests-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(config.stash[FOLDER])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session for what is left. Fixtures and processes of pytest-xdist have ended."""
    if (folder := session.config.stash.get(FOLDER, None)) is None:
        return
    names = [each.name for each in folder.iterdir()]
    left = sorted(name for name in names if not any(fnmatch(name, kept) for kept in KEPT))
    if left:
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(f"left in the temporary folder: {', '.join(left)}", red=True)
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder."""
    if (folder := config.stash.get(FOLDER, None)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
