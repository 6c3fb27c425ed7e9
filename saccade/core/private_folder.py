"""Directories that only this user can write. They store files that are trusted when they are read
again, such as compiled kernels.

A directory is opened component by component from the root, and only this user and root may own or
replace any component. All later operations use the open descriptor, so the path is not resolved
again.
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
"""Flags for `os.open` that reject symbolic links and do not block on pipes."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | SAFELY
PARENT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a parent directory. O_PATH is included because a parent may not be readable (/home
often is not).
"""


def cache_folder(name: str) -> Path:
    """Return the path of `name` in the user's cache directory. It may not exist yet.

    Raises OSError for a user without a home directory.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if not root.is_absolute():  # the XDG specification says to ignore relative paths
            root = Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None
    return root / "saccade" / name


class PrivateFolder:
    """An open directory that only this user can write. Methods take names of files in it, and raise
    OSError.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read(self, name: str) -> bytes:
        """Return the content of the regular file `name`."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically.

        Until it is complete, the content is in a file with a random name of 64 hexadecimal digits.
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
        """Open a regular file without following symbolic links. Returns its file descriptor."""
        handle = os.open(name, flags | SAFELY, 0o600, dir_fd=self._handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, f"{name} is not a regular file")
        return handle

    def entries(self) -> list[tuple[str, os.stat_result]]:
        """Return the name and stat result of each entry. Symbolic links are not followed."""
        found = []
        with os.scandir(self._handle) as scan:
            for entry in scan:
                with suppress(FileNotFoundError):  # another process has removed it
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    def writable(self) -> bool:
        """Return True if this process can create files in the directory."""
        return os.access(".", os.W_OK | os.X_OK, dir_fd=self._handle)

    def touch(self, name: str) -> None:
        """Set a file's modification time to now, to record that it was used."""
        os.utime(name, dir_fd=self._handle, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=self._handle)


@contextmanager
def private_folder(path: Path) -> Iterator[PrivateFolder]:
    """Open a directory, and create it if it is missing.

    Raises OSError if it cannot be opened, or if other users can change it.
    """
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
            if stat.S_ISLNK(found.st_mode) and pending:  # the last component must not be a link
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
    with suppress(FileExistsError):  # another process created it at the same time
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _check_owner(name: str, found: os.stat_result, links: int) -> None:
    if links > MAX_LINKS:
        raise OSError(errno.ELOOP, f"{name} has too many symbolic links in its path")
    if found.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"{name} is owned by another user, who could replace it")


def _check_mode(name: str, found: os.stat_result, *, last: bool) -> None:
    """Raise OSError if other users can create or replace files in the directory `name`.

    last: False for a parent. In a parent with the sticky bit, such as /tmp, other users cannot
    replace our files.
    """
    others = found.st_mode & OTHERS
    if not others or (not last and (found.st_mode & stat.S_ISVTX or _is_own_group(found))):
        return
    raise OSError(errno.EPERM, f"other users can write to {name} (chmod go-w)")


def _is_own_group(found: os.stat_result) -> bool:
    """Return True if only the owner and the group can write, and this user is the group's only
    member.

    Many systems create such a private group for each user.
    """
    if found.st_mode & stat.S_IWOTH:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}
