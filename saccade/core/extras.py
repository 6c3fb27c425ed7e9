"""How to install a missing optional dependency (an extra): the command for the server's operator,
and a message for clients that reveals nothing about the host. Also finds installed packages that
are too new.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

SOURCE = Path(__file__).parents[2]
"""The parent directory of the package. It is the source directory unless Saccade was installed from
a wheel.
"""
SCRIPT = "scripts/install.py"
"""The script that installs the tested versions of dependencies. It works with pip and uv."""


def how_to_install(what: str, source: Path = SOURCE) -> str:
    """Return the shell command that installs `what`: `.[gguf]`, `./bench` or a package's name."""
    if not (source / SCRIPT).is_file():
        return f"python {SCRIPT} {shlex.quote(what)} in Saccade's source directory"
    python = Path(sys.executable)
    if python.is_relative_to(source):
        python = python.relative_to(source)
    # A source checkout stays editable.
    editable = ("-e",) if what.startswith(".[") else ()
    return f"cd {shlex.quote(str(source))} && {shlex.join((str(python), SCRIPT, *editable, what))}"


def ask_operator(extra: str) -> str:
    """Return advice for a client whose request needs a missing extra, as part of a sentence."""
    line = f"python {SCRIPT} '.[{extra}]' in Saccade's source directory"
    return f"ask the server's operator to install the extra `{extra}` ({line})"


_BOUND = re.compile(r"([\w.-]+)[^;<]*<(\d+(?:\.\d+)*)")
"""Matches a requirement with an upper bound. The groups are its name and the first version that is
too new.
"""


def too_new() -> str:
    """Return a sentence that lists installed packages newer than Saccade allows, or "" if there are
    none.
    """
    with suppress(PackageNotFoundError):
        return describe_too_new(requires("saccade") or ())
    return ""


def describe_too_new(requirements: Iterable[str]) -> str:
    found = list(_too_new(requirements))
    if not found:
        return ""
    installed = ", ".join(f"{name} {has}" for name, has, _ in found)
    wanted = " ".join(f"'{name}<{bound}'" for name, _, bound in found)
    return f"too new for this version of Saccade: {installed}. Install older ones: {wanted}"


def _too_new(requirements: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, installed version, upper bound) of each package that is too new.

    A pre-release of the upper bound counts as the bound itself.
    """
    for bounded in map(_BOUND.match, requirements):
        with suppress(PackageNotFoundError):
            if bounded and _release(has := version(bounded[1])) >= _release(bounded[2]):
                yield bounded[1], has, bounded[2]


def _release(text: str) -> list[int]:
    """Return the numbers in a version, without trailing zeros."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]|\.[^\d]", text)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
