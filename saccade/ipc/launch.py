"""Runs a module as `python -m` does, from the copy of Saccade that contains this file: `python -P
.../launch.py MODULE ARGUMENTS...`. Started by `python.py`.

It is run by its path because Saccade may not be on Python's path: a clone need not be installed. It
imports Saccade only after adding its directory to the path.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableSequence


def put_first(root: str, path: MutableSequence[str]) -> None:
    """Insert `root` into `path` if `saccade` would otherwise be imported from another directory.

    It is inserted just before that directory, or at the end. So Python's own modules, and installed
    ones if possible, take precedence over files in `root`.
    """
    held = (i for i, folder in enumerate(path) if os.path.isdir(os.path.join(folder, "saccade")))  # noqa: PTH112, PTH118
    index = next(held, len(path))
    if index == len(path) or path[index] != root:
        path.insert(index, root)


def main() -> None:
    """Run the module as `__main__`."""
    put_first(os.path.abspath(f"{__file__}/../../.."), sys.path)  # noqa: PTH100
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
