"""Notes which of Saccade's functions a process enters. Imported by Python itself where this folder
is on its path: by the server's processes of `tests/e2e/test_walks.py` alone.

A walk is numbered by the first byte of a file that the test writes; 0 ends it. Image workers are
left out: they have given up all files.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

ROOM = str(Path(__file__).parents[2] / "saccade") + os.sep
ROLES = {"saccade.engine.main": "engine", "saccade.runtime.process": "worker", "serve": "front"}


def note(folder: Path, role: str) -> None:
    """Write `walk role file function` to a file of this process, once for each."""
    with (folder / "walk").open("rb") as file:
        walk = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    notes = os.open(folder / f"{role}-{os.getpid()}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    seen: set[tuple[int, CodeType]] = set()

    def entered(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (number := walk[0]):
            return
        code = frame.f_code
        if (number, code) in seen:
            return
        seen.add((number, code))
        if code.co_filename.startswith(ROOM):
            place = code.co_filename.removeprefix(ROOM)
            os.write(notes, f"{number} {role} {place} {code.co_qualname}\n".encode())

    sys.setprofile(entered)
    threading.setprofile(entered)


for word in sys.orig_argv if "SACCADE_WALKS" in os.environ else ():
    if word in ROLES:
        note(Path(os.environ["SACCADE_WALKS"]), ROLES[word])
        break
