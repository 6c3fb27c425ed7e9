"""Runs a module as `python -m` does, with the Saccade that this file belongs to:
`python -P .../launch.py MODULE WORDS...`, started by `python.py`.

It is run by its path because Saccade may not be on Python's path: a clone need not be
installed. Imports Saccade only after adding its directory to the path.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableSequence


def put_first(root: str, path: MutableSequence[str]) -> None:
    """Insert `root` into `path` if another folder would provide `saccade` instead.

    It comes no earlier than needed, behind Python's own modules and, if possible, installed ones.
    """
    held = (i for i, folder in enumerate(path) if os.path.isdir(os.path.join(folder, "saccade")))  # noqa: PTH112, PTH118
    index = next(held, len(path))
    if index == len(path) or path[index] != root:
        path.insert(index, root)


def main() -> None:
    """Become the module."""
    put_first(os.path.abspath(f"{__file__}/../../.."), sys.path)  # noqa: PTH100
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
