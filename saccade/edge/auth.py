"""Whose request it is: the keys that open the server, and the client that a request comes from.

Owns the reading of keys and of `--api-keys-file`. The only place where an HTTP request becomes a
`Client`.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path

from starlette.types import Scope

from saccade.core.client import Client
from saccade.core.errors import ConfigError
from saccade.core.options import ServerOptions
from saccade.edge.headers import given_key

CLIENT = "saccade.client"
"""Where in a scope the client stands, once its key has been found."""

_LINE = re.compile(r"([A-Za-z0-9._-]{1,64})[ \t]*(?::|[ \t])[ \t]*(\S+)")


class Keys:
    """The keys by their names; the one of --api-key has the name "". With one key or none, all
    clients are alike.
    """

    def __init__(self, names: Mapping[str, str], shares_cache: bool = False) -> None:
        """`names`: key -> name."""
        several = len(names) > 1
        self._clients = [
            (key.encode(), Client(name if several else "", "", shares_cache, several))
            for key, name in names.items()
        ]

    @classmethod
    def of(cls, options: ServerOptions) -> Keys:
        """Raises ConfigError where the file of keys cannot be used."""
        names = {} if options.key is None else {options.key: ""}
        if options.api_keys_file is not None:
            for key, name in read_keys(Path(options.api_keys_file)).items():
                if key in names:
                    raise ConfigError(f"--api-keys-file: {name}: its key is --api-key's too")
                names[key] = name
        return cls(names, options.share_cache)

    def __len__(self) -> int:
        return len(self._clients)

    def client(self, scope: Scope) -> Client | None:
        """Who carries which key; None without a right one. Every key is compared, in a time that
        tells nothing of where they differ.
        """
        given, found = given_key(scope), None
        for wanted, client in self._clients:
            if hmac.compare_digest(given, wanted):
                found = client
        if found is None:
            return None
        return Client(found.name, _address(scope), found.shares_cache, found.limited)


def client_of(scope: Scope) -> Client:
    """Who sent the request; without keys only its address is known."""
    found = scope.get(CLIENT)
    return found if isinstance(found, Client) else Client(address=_address(scope))


def read_keys(path: Path) -> dict[str, str]:
    """The keys of a file and their names: a line for each, `name:key` or `name key`; empty lines
    and those that begin with # count for nothing.

    Raises ConfigError that names the line, never the key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-keys-file {path}: {error}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise ConfigError(
                f"--api-keys-file {path}: line {number}: expected name:key, the name of letters, "
                "digits and ._- (64 at most), the key without spaces"
            )
        name, key = parts.groups()
        if key in keys or name in keys.values():
            raise ConfigError(f"--api-keys-file {path}: line {number}: {name}: given twice")
        keys[key] = name
    if not keys:
        raise ConfigError(f"--api-keys-file {path}: there is no key in it")
    return keys


def _address(scope: Scope) -> str:
    """Where the connection comes from; of IPv6 the network, in which a client has all addresses."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return str(host)
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
