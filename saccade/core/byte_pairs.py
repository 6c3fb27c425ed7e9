"""Byte-level BPE: the characters that stand for bytes, and the merges that follow from a
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def _alphabet() -> dict[str, int]:
    """Map the printable characters with which GPT-2's tokenizer writes bytes to these bytes.

    Printable Latin-1 characters stand for themselves. The other bytes are written as characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF = _alphabet()
"""Map from each of these characters to its byte."""


def merges_of(known: Mapping[str, int], ranked: Iterable[str]) -> list[tuple[str, str]]:
    """Return every pair of tokens that together form a token, in the order of `ranked`.

    known: token ids by the token's string. Pairs that form the same token are sorted by their ids.
    ranked: token strings, the highest rank first.
    """
    return [
        pair
        for token in ranked
        for pair in sorted(
            (
                (token[:at], token[at:])
                for at in range(1, len(token))
                if token[:at] in known and token[at:] in known
            ),
            key=lambda pair: (known[pair[0]], known[pair[1]]),
        )
    ]
