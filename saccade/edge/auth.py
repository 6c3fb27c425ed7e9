"""API keys from --api-key and `--api-keys-file`. The file is read again when it changes.

Imported only by servers that require a key.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from pathlib import Path

from starlette.types import Scope

from saccade.core.client import Client
from saccade.core.errors import ConfigError
from saccade.core.given_paths import read_text, reason, shown
from saccade.core.settings import KeySettings
from saccade.edge.headers import address_of_client, given_key

log = logging.getLogger("saccade")

CHECK_SECONDS = 1.0
"""Minimum interval between checks whether the file with keys has changed."""
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64})[ \t]*(?::|[ \t])[ \t]*(\S+)")


class Keys:
    """The API keys, and the client that each identifies. The key from --api-key has the name "".

    Caches and files belong to the name of a key, so adding or removing a key does not affect other
    keys.
    """

    def __init__(
        self,
        key: str | None,
        settings: KeySettings = KeySettings(),  # noqa: B008 - frozen
    ) -> None:
        """Read all keys. `key` is the key from --api-key, if any. Raises ConfigError if the file is
        unusable.
        """
        self._key = key
        self._share_cache = settings.share_cache
        file = settings.api_keys_file
        self._file = None if file is None else Path(file)
        self._version = self._stat()
        self._clients = self._read()
        self._looked = time.monotonic()

    def __len__(self) -> int:
        return len(self._clients)

    def client(self, scope: Scope) -> Client | None:
        """Return the client that the API key in the request's headers identifies, or None if the
        key is missing or wrong.

        The key is compared with all keys of the server, in constant time.
        """
        self._look()
        given, found = given_key(scope), None
        for wanted, client in self._clients:
            if hmac.compare_digest(given, wanted):
                found = client
        if found is None:
            return None
        return Client(found.name, address_of_client(scope), found.shares_cache, found.limited)

    def _look(self) -> None:
        """Read the file with keys again if it has changed. This is checked at most once in
        `CHECK_SECONDS`.

        If the file is unusable, the previous keys stay valid.
        """
        now = time.monotonic()
        if self._file is None or now - self._looked < CHECK_SECONDS:
            return
        self._looked, before = now, self._version
        self._version = self._stat()
        if self._version == before:
            return
        try:
            self._clients = self._read()
        except ConfigError as error:
            log.error("%s: the keys are unchanged", error)
        else:
            log.info("--api-keys-file %s was read again: %d keys", self._file, len(self))

    def _stat(self) -> tuple[int, ...]:
        """Return values that differ whenever the file has changed. Empty if there is no file."""
        try:
            found = None if self._file is None else self._file.stat()
        except OSError:
            found = None
        return () if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)

    def _read(self) -> list[tuple[bytes, Client]]:
        names = {} if self._key is None else {self._key: ""}
        if self._file is not None:
            for key, name in read_keys(self._file).items():
                if key in names:
                    raise ConfigError(f"--api-keys-file: {name} has the same key as --api-key")
                names[key] = name
        several = len(names) > 1
        return [
            (key.encode(), Client(name, "", self._share_cache, several))
            for key, name in names.items()
        ]


def read_keys(path: Path) -> dict[str, str]:
    """Read a file with API keys, and return their names by key.

    Each line is `name:key` or `name key`. Empty lines and comments (#) are skipped.

    Raises ConfigError with the line number, but without the key.
    """
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(
            f"--api-keys-file {path} is not encoded as UTF-8: save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"--api-keys-file {shown(path)}: {reason(error)}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise ConfigError(
                f"--api-keys-file {path}: line {number}: expected name:key, with a name of at "
                "most 64 letters, digits and ._-, and a key without spaces"
            )
        name, key = parts.groups()
        if key in keys or name in keys.values():
            raise ConfigError(
                f"--api-keys-file {path}: line {number}: the name {name} is used twice"
            )
        keys[key] = name
    if not keys:
        raise ConfigError(f"--api-keys-file {path}: it contains no keys")
    return keys
