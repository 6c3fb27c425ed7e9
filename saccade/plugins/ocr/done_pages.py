"""Stores the pages that were read before an interruption, in a file next to the output.

The file has a line of JSON per page, with a hash of everything that its text depends on. So if a
file, the model or the prompt has changed, pages are read again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from saccade.core.decoders import json_decoder
from saccade.core.errors import ConfigError
from saccade.core.given_paths import reason, shown

SUFFIX = ".pages"


@dataclass(frozen=True, slots=True)
class ReadPage:
    """The text of a page.

    whole: False if it was cut off at `max_tokens`.
    """

    name: str
    text: str
    whole: bool
    max_tokens: int


_LINE = json_decoder(ReadPage)


class DonePages:
    """The finished pages of one output file. Without an output file, they are stored only in
    memory.
    """

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self._pages: dict[str, ReadPage] = {}
        torn = b""
        for line in file or ():
            torn = line
            try:
                page = _LINE.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            self._pages[page.name] = page
        if file is not None and torn and not torn.endswith(b"\n"):
            file.write(b"\n")

    def find(self, name: str, max_tokens: int) -> ReadPage | None:
        """Return a stored page, or None if there is none or reading it again would change it."""
        page = self._pages.get(name)
        if page is None or not (page.whole or page.max_tokens == max_tokens):
            return None
        return page

    def add(self, page: ReadPage) -> None:
        """Store a page. On disk, it remains when this process ends."""
        self._pages[page.name] = page
        if self._file is not None:
            self._file.write(json.dumps(asdict(page), ensure_ascii=True).encode() + b"\n")
            self._file.flush()


@contextmanager
def done_pages(output: Path | None) -> Iterator[DonePages]:
    """Open the stored pages for an output file. Raises ConfigError if another process uses them."""
    if output is None:
        yield DonePages(None)
        return
    path = beside(output)
    try:
        file = path.open("a+b")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {shown(output)}: {reason(error)}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--output {shown(output)} is being written by another saccade ocr: wait for it, "
                "or choose another output"
            ) from None
        file.seek(0)
        try:
            yield DonePages(file)
        finally:
            if not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)


def beside(output: Path) -> Path:
    """Return the path of the file that stores the pages for an output file."""
    return output.with_name(output.name + SUFFIX)


def write_whole(output: Path, text: str) -> None:
    """Write the output file atomically. Raises ConfigError."""
    new = output.with_name(f"{output.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8", errors="backslashreplace")
        new.replace(output)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"--output {shown(output)}: {reason(error)}") from None
