"""How to install what a message misses: the line to type on this machine, for its operator; and
words for clients, who learn nothing of this machine.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2]
"""The folder of Saccade's source, unless a wheel brought this file."""
SCRIPT = "scripts/install.py"
"""Works with pip and with uv, and keeps the versions that were tested."""


def how_to_install(what: str, source: Path = SOURCE) -> str:
    """Return the line that installs `what`: `.[gguf]`, `./bench` or the name of a package."""
    if not (source / SCRIPT).is_file():
        return f"python {SCRIPT} {shlex.quote(what)} in the folder of Saccade's source"
    python = Path(sys.executable)
    if python.is_relative_to(source):
        python = python.relative_to(source)
    # What runs from its source stays so.
    editable = ("-e",) if what.startswith(".[") else ()
    return f"cd {shlex.quote(str(source))} && {shlex.join((str(python), SCRIPT, *editable, what))}"


def ask_operator(extra: str) -> str:
    """Return what a client can do about a missing extra, as part of a sentence."""
    line = f"python {SCRIPT} '.[{extra}]' in the folder of Saccade's source"
    return f"have the server's operator install the extra `{extra}` ({line})"
