"""The place of a measurement's results, checked before measuring.

Knows nothing of the files' content.
"""

from __future__ import annotations

import os
from pathlib import Path

from saccade.core.errors import ConfigError


def make_room(options: object, *names: str) -> None:
    """Make the folders of the files that these fields name; None names no file.

    Raises ConfigError where none can be written.
    """
    for name in names:
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        option = f"--{name.replace('_', '-')} {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{option}: its folder cannot be made: {error.strerror}") from None
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{option}: no file can be written there")
