"""Folders of this user alone, for what is trusted when it is read again: machine code, facts.

Opened once, step by step from the root: only this user and root may own or replace any part
of the path. Later operations use the descriptor, so that no path is looked at twice.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_LINKS = 40
NAME_BYTES = 32
OTHERS = stat.S_IWGRP | stat.S_IWOTH
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, and a pipe without a writer is not waited for."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | SAFELY
PARENT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""A parent need not be readable: /home often is not."""


def cache_folder(name: str) -> Path:
    """Return the folder `name` in the user's cache folder. It may be missing.

    Raises OSError for a user without a home.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if not root.is_absolute():  # to be ignored, by the specification of these variables
            root = Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None
    return root / "saccade" / name


class PrivateFolder:
    """An open folder. Names are those of files in it. Methods raise OSError."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read(self, name: str) -> bytes:
        """Return a regular file's content."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write a file, which appears under its name when it is whole.

        Until then it has a random name of 64 hexadecimal digits.
        """
        draft = secrets.token_hex(NAME_BYTES)
        try:
            handle = self.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(draft, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except OSError:
            with suppress(OSError):
                self.remove(draft)
            raise

    def open(self, name: str, flags: int) -> int:
        """Open a regular file, and no link. Returns the descriptor."""
        handle = os.open(name, flags | SAFELY, 0o600, dir_fd=self._handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, f"{name} is not a regular file")
        return handle

    def entries(self) -> list[tuple[str, os.stat_result]]:
        """Return names and facts of all that is there. No link is followed."""
        found = []
        with os.scandir(self._handle) as scan:
            for entry in scan:
                with suppress(FileNotFoundError):  # another process has removed it
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    def writable(self) -> bool:
        """Return True if files can be made."""
        return os.access(".", os.W_OK | os.X_OK, dir_fd=self._handle)

    def touch(self, name: str) -> None:
        """Record a use of a file."""
        os.utime(name, dir_fd=self._handle, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=self._handle)


@contextmanager
def private_folder(path: Path) -> Iterator[PrivateFolder]:
    """Open a folder, made if missing. Raises OSError, also if other users could change it."""
    handle = _open(path)
    try:
        yield PrivateFolder(handle)
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    if not path.is_absolute():
        raise OSError(errno.EINVAL, f"{path} is not absolute")
    handle, pending, links = os.open("/", PARENT), _reversed(path), 0
    try:
        while pending:
            name = pending.pop()
            found = _look_or_make(handle, name)
            if stat.S_ISLNK(found.st_mode) and pending:  # the folder itself is no link
                links += 1
                _check_owner(name, found, links)
                target = Path(os.readlink(name, dir_fd=handle))
                pending += _reversed(target)
                name = "/" if target.is_absolute() else "."
            child = os.open(name, PARENT if pending else FOLDER, dir_fd=handle)
            os.close(handle)
            handle = child
            found = os.fstat(handle)
            _check_owner(name, found, links)
            _check_mode(name, found, last=not pending)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _reversed(path: Path) -> list[str]:
    return [part for part in reversed(path.parts) if part != path.anchor]


def _look_or_make(folder: int, name: str) -> os.stat_result:
    with suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    with suppress(FileExistsError):  # by another process, meanwhile
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _check_owner(name: str, found: os.stat_result, links: int) -> None:
    if links > MAX_LINKS:
        raise OSError(errno.ELOOP, f"{name}: too many links")
    if found.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"{name} is owned by another user, who could replace it")


def _check_mode(name: str, found: os.stat_result, *, last: bool) -> None:
    """Refuse a folder in which other users can make or replace what we read.

    In a parent with the sticky bit, such as /tmp, other users cannot replace our files.
    """
    others = found.st_mode & OTHERS
    if not others or (not last and (found.st_mode & stat.S_ISVTX or _is_own_group(found))):
        return
    raise OSError(errno.EPERM, f"other users can write to {name} (chmod go-w)")


def _is_own_group(found: os.stat_result) -> bool:
    """Return True if only the group may write too, and it is this user's own, as many systems
    give every user one.
    """
    if found.st_mode & stat.S_IWOTH:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}
