"""Runs a module as `python -m` does, from the copy of Saccade that contains this file: `python -P
.../launch.py MODULE ARGUMENTS...`. `python.py` builds this command.

Python runs this file by its path, because Saccade may not be on the import path: a clone need not
be installed. This file imports Saccade only after adding its directory to the import path.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableSequence


def put_first(root: str, path: MutableSequence[str]) -> None:
    """Insert `root` into `path` if `saccade` would otherwise be imported from another directory.

    It is inserted just before that directory, or else at the end. The standard library and, if
    possible, installed packages thus take precedence over files in `root`.
    """
    held = (i for i, folder in enumerate(path) if os.path.isdir(os.path.join(folder, "saccade")))  # noqa: PTH112, PTH118
    index = next(held, len(path))
    if index == len(path) or path[index] != root:
        path.insert(index, root)


def main() -> None:
    """Run the module named by the first command-line argument as `__main__`."""
    put_first(os.path.abspath(f"{__file__}/../../.."), sys.path)  # noqa: PTH100
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
