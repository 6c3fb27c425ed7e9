"""Options of `prove`. The string below each field is its help. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_IMAGES = 5_000


class ProveError(Exception):
    """The options are invalid, or the server fails. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """The images of the questions."""

    cases: tuple[str, ...] = ()
    """Cases to try. Default: all of them."""
    images: int = 600
    """Images in the case "many". Among 600, two share a 16-bit key with 94 % probability and a
    24-bit key with 1 %.
    """
    host: str = "127.0.0.1"
    """This machine's address, where the server fetches images in the cases about URLs."""
    seed: int | None = None
    """Seed for the numbers in the images. By default, each run uses a new one, so that no server
    has the images cached.
    """
    cold_url: str | None = None
    """The same engine and model without any cache, at another URL. Each answer is then also
    compared with that server's answer to the same request, which needs no model that can read.
    """
    restart_command: str = ""
    """A command that restarts the server, for the case "restart": entries that a cache has on disk.
    """
    output_file: Path | None = None
    """Write the findings here, as JSON, with the requests of each mix-up."""
