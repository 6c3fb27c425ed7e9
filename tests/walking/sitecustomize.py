"""Records the functions that a process of a server enters, and the modules that it has imported.
Python imports this file where its folder is on the path: in the servers of `tests/e2e/walks.py`.

The first byte of a file that the test writes says what to record: 0 nothing, `LOADED` the modules,
any other number the functions, under that number. Image workers are left out, as they have given
up all files.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = str(Path(__file__).parents[2] / "saccade") + os.sep
ROLES = {"saccade.engine.main": "engine", "saccade.runtime.process": "worker", "serve": "front"}
LOADED = 255
END = "end"
"""Follows the last module of a process."""


def record(folder: Path, role: str) -> None:
    """Write lines of `number role file function` to a file of this process, each once."""
    with (folder / "walk").open("rb") as file:
        walk = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    notes = os.open(folder / f"{role}-{os.getpid()}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    seen: set[tuple[int, CodeType | None]] = set()

    def entered(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (number := walk[0]):
            return
        code = None if number == LOADED else frame.f_code
        if (number, code) in seen:
            return
        seen.add((number, code))
        lines = [(frame.f_code.co_filename, frame.f_code.co_qualname)] if code else loaded()
        for path, name in lines:
            if path.startswith(PACKAGE):
                file = path.removeprefix(PACKAGE)
                os.write(notes, f"{number} {role} {file} {name}\n".encode())

    sys.setprofile(entered)
    threading.setprofile(entered)


def loaded() -> list[tuple[str, str]]:
    """Return the path and name of each module of the server, then `END`."""
    modules = [
        (vars(module).get("__file__") or "", name)
        for name, module in list(sys.modules.items())
        if name == "__main__" or name.split(".")[0] == "saccade"
    ]
    return [*modules, (PACKAGE + END, END)]


for word in sys.orig_argv if "WALKS_FOLDER" in os.environ else ():
    if word in ROLES:
        record(Path(os.environ["WALKS_FOLDER"]), ROLES[word])
        break
