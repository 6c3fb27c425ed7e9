"""Names of KV pages, for places that outlive the trie.

A name has 256 bits and is chained from the root. It differs wherever anything differs that a page's
keys and values depend on.

    root (identity of the server's pages, salt, adapter) ◀── first page ◀── second page ...

Knows nothing of where pages lie. All numbers have one width, and texts stand behind their lengths,
so that different contents are written differently.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import pack

from saccade.cache.content import PageKey

NAME_BYTES = 32


def _text(value: bytes) -> bytes:
    return pack("<Q", len(value)) + value


def root_name(identity: bytes, salt: str, adapter: str = "") -> bytes:
    """Return the name of the empty prefix.

    identity: see `core.page_store.PageIdentity`. adapter: its fingerprint.
    """
    facts = b"root" + _text(identity) + _text(salt.encode()) + _text(adapter.encode())
    return blake2b(facts, digest_size=NAME_BYTES).digest()


def page_name(parent: bytes, key: PageKey) -> bytes:
    """Return the name of the page with content `key` after the page `parent`."""
    tokens, shown = key
    name = blake2b(b"page" + parent, digest_size=NAME_BYTES)
    name.update(pack(f"<{1 + len(tokens)}q", len(tokens), *tokens))
    for position, length, image, row, time in shown:
        name.update(pack("<3qB", position, length, row, time is not None))
        name.update(pack("<q", time or 0))
        name.update(_text(image.digest) + _text(image.settings) + _text(image.salt.encode()))
    return name.digest()


def state_name(page: bytes) -> bytes:
    """Return the name of a sequence's state after the page, for models that keep one."""
    return blake2b(b"state" + page, digest_size=NAME_BYTES).digest()
