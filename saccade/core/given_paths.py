"""Opens paths that clients and operators specify without blocking, and describes errors in a
sentence.

Such a path may be too long, form a loop of symbolic links, or be on a failing disk. It may also be
a pipe, which blocks, or a device, which never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saccade.core.errors import CheckpointError, ConfigError

MAX_TEXT = 64 << 20
"""Maximum size in bytes of a text file that an operator specifies."""
MAX_SHOWN = 300


def regular(path: str, flags: int) -> int:
    """Open a regular file without blocking. Can be passed to `open` as `opener`.

    Raises OSError for other types of files.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file. Raises OSError if it cannot be read or is larger than `most` bytes."""
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most + 1) if size <= most else b""
    if size > most or len(data) > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes; the limit is {most}", os.fspath(path))
    return data


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a regular file as text. Raises OSError or UnicodeDecodeError."""
    return read_bytes(path, MAX_TEXT).decode(encoding)


def check_given(option: str, name: str, *, folder: bool = False) -> None:
    """Raise ConfigError unless the path `name` is a regular file or missing. With `folder`, it must
    be an existing directory.

    option: the command-line option, for the error message.
    """
    wanted, right = ("folder", stat.S_ISDIR) if folder else ("file", stat.S_ISREG)
    try:
        if name and right(Path(name).stat().st_mode):
            return
    except (FileNotFoundError, NotADirectoryError):
        if not folder:
            return
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {shown(name)!r}: {reason(error)}") from None
    raise ConfigError(f"{option} {shown(name)!r} is not a {wanted}")


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Convert OSError within the context to CheckpointError with the path and the reason.

    what: names the file in the message if the error has no path.
    """
    try:
        yield
    except OSError as error:
        where = what if error.filename is None else os.fsdecode(error.filename)
        raise CheckpointError(f"{shown(where)} cannot be read: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an error's message without its errno and its path."""
    words = error.strerror if isinstance(error, OSError) else None
    return words or str(error) or type(error).__name__


def shown(name: object) -> str:
    """Return `name` as text for a message, truncated to `MAX_SHOWN` characters."""
    text = str(name)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def sendable(words: str) -> str:
    """Return `words` with every character that UTF-8 cannot encode as an escape. File names may
    contain any bytes.
    """
    return words.encode("utf-8", "backslashreplace").decode()
