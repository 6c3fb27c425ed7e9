"""Paths that cannot be read as a file, each for a reason of its own."""

from __future__ import annotations

import os
from pathlib import Path


def strange_paths(folder: Path) -> dict[str, str]:
    """By kind. The pipe has no writer, so that whoever opens it as usual waits for ever."""
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "folder").mkdir()
    (folder / "file").touch()
    os.mkfifo(folder / "pipe")
    return {
        "long": str(folder / ("a" * 300)),
        "nul": f"{folder}/a\0b",
        "loop": str(folder / "loop"),
        "folder": str(folder / "folder"),
        "pipe": str(folder / "pipe"),
        "device": "/dev/zero",
        "below a file": str(folder / "file" / "a"),
        "surrogate": f"{folder}/\ud800",
    }
