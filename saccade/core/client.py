"""Who sends a request: one identity, derived once, from which follow its cache, its files and its
share.

Knows nothing of HTTP headers: `edge/auth.py` reads those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from blake3 import blake3

SHARE = 0.5
"""Where there are several keys: what one may have of the permits, of the bytes in flight, and of
the disk for uploaded files.
"""
SALT_BYTES = 16
"""Length of a salt within the server, whatever the client sent."""


@dataclass(frozen=True, slots=True)
class Client:
    """`name` is that of the key, "" where there is one key or none; `address` is where the
    connection comes from, "" for calls from Python. `limited`: it is one of several, each of which
    is held to `SHARE` of what all have.
    """

    name: str = ""
    address: str = ""
    shares_cache: bool = False
    limited: bool = False

    def salt(self, given: str) -> str:
        """What separates this client's cache: hexadecimal of fixed length, from its name and the
        `cache_salt` it gave; "" where there is neither.
        """
        name = "" if self.shares_cache else self.name
        if not (name or given):
            return ""
        return blake3(json.dumps([name, given]).encode()).hexdigest(SALT_BYTES)

    def share(self, given: str) -> str:
        """Under which name its requests take turns with others': its key's, else its salt's, else
        its address.
        """
        if self.name:
            return f"key {self.name}"
        return f"salt {self.salt(given)}" if given else self.address


ANYBODY = Client()
"""Where nobody is told from anybody else."""
