"""Directories that a server reserves by writing a marker file, and safe ways to open files in
directories where other users can write.

A server removes files in its directory. So it rejects a directory that contains other files but no
marker. (Earlier versions wrote no marker, so files with their names are accepted.)
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import ConfigError
from saccade.core.given_paths import reason, shown
from saccade.core.private_folder import OTHERS, SAFELY

log = logging.getLogger("saccade")


@dataclass(frozen=True, slots=True)
class Claim:
    """The marker file's name for one type of directory, and the pattern of all other names in
    it.
    """

    marker: str
    names: re.Pattern[str]

    def check(self, folder: Path) -> None:
        """Raise OSError, with the reason, if a directory has no marker but contains other programs'
        files.

        A missing directory is accepted.
        """
        try:
            found = sorted(path.name for path in folder.iterdir())
        except FileNotFoundError:
            return
        strangers = [name for name in found if not self.names.fullmatch(name)]
        if self.marker not in found and strangers:
            raise OSError(
                errno.ENOTEMPTY,
                f"it contains {strangers[0]!r} but no {self.marker}, so another program uses it, "
                "and this server would remove its files: choose an empty or a new directory",
            )

    def claim_folder(self, folder: Path) -> int:
        """Create `folder` if it is missing, and write the marker file.

        Returns the user id that owns new files there, which a network file system may map to
        another user. Raises OSError, with the reason.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.check(folder)
        with open(folder / self.marker, "r+b", opener=made_beside) as marker:
            if not os.fstat(marker.fileno()).st_size:
                marker.write(
                    b"Saccade keeps files in this folder, and removes them. Put nothing else here."
                    b"\n"
                )
        with tempfile.TemporaryFile(dir=folder) as made:
            return os.fstat(made.fileno()).st_uid


def check_folder(option: str, name: str, claim: Claim) -> None:
    """Raise ConfigError unless the directory `name` already has the marker of `claim`, or can get
    it.

    option: the command-line option that names the directory, for the error message.
    """
    try:
        folder = Path(name).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            folder.stat()
        standing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{option} {shown(name)!r}: {reason(error)}") from None
    if not name or not standing.is_dir():
        raise ConfigError(f"{option} {name!r}: {standing} is not a directory")
    if standing != folder and not os.access(standing, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {name!r}: cannot create files in {standing}")
    if standing == folder:
        try:
            claim.check(folder)
        except OSError as error:
            raise ConfigError(f"{option} {name!r}: {error.strerror}") from None


def warn_of_others(option: str, folder: Path) -> None:
    """Log a warning if other users can write to a directory. option: the option that names it."""
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & OTHERS:
        log.warning(
            "%s %s has mode %o: other users can change what this server reads. Remove their write "
            "permission (chmod go-w)",
            option,
            folder,
            mode,
        )
    elif found.st_uid not in (0, os.geteuid()):
        log.warning(
            "%s %s belongs to user %d, who can change what this server reads",
            option,
            folder,
            found.st_uid,
        )


def beside(path: str, flags: int) -> int:
    """Open a regular file in a directory where other users can write. Can be passed to `open` as
    `opener`.

    Raises `Strange` unless the file is regular, because a link could point anywhere and opening a
    pipe blocks. Raises OSError if it cannot be opened.
    """
    try:
        handle = os.open(path, flags | SAFELY, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise Strange(path) from None
        raise
    found = os.fstat(handle)
    # A file to write must have no other hard link, which could be another user's file.
    if not stat.S_ISREG(found.st_mode) or (flags & os.O_RDWR and found.st_nlink > 1):
        os.close(handle)
        raise Strange(path)
    return handle


def made_beside(path: str, flags: int) -> int:
    """Open a file as `beside` does. Create it if it is missing, and leave existing content
    unchanged.
    """
    return beside(path, flags | os.O_CREAT)


class Strange(OSError):
    """A file of this server was replaced by something other than a regular file."""

    def __init__(self, path: str) -> None:
        super().__init__(
            errno.EINVAL, f"{Path(path).name} is not a regular file owned by this user"
        )


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a directory, and yield its descriptor. Raises OSError if it cannot be opened or is a
    symbolic link.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | SAFELY)
    except NotADirectoryError:
        raise OSError(errno.ENOTDIR, f"its entry {path.name} is not a directory") from None
    try:
        yield handle
    finally:
        os.close(handle)
