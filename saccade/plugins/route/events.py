"""A stream of events on its way. Complete events go on at once, and an incomplete event waits, so
that a dying worker leaves only whole events behind.

Owns the bound on waiting bytes.
"""

from __future__ import annotations

_END = b"\n\n"
MAX_WAITING = 1 << 18
"""Bytes of an event that wait for its end; a larger one goes on as it comes."""


class Events:
    """The events of one stream."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._begun = False  # part of an event has gone on

    def feed(self, piece: bytes) -> bytes:
        """Return the bytes that may go on after `piece`."""
        seen = max(0, len(self._rest) - len(_END) + 1)
        self._rest += piece
        at = self._rest.rfind(_END, seen)
        if at >= 0:
            size = at + len(_END)
            self._begun = False
        elif len(self._rest) > MAX_WAITING:
            size = len(self._rest) - len(_END) + 1  # an end may be half there
            self._begun = True
        else:
            return b""
        whole = bytes(self._rest[:size])
        del self._rest[:size]
        return whole

    def flush(self) -> bytes:
        """Return the rest of a stream that has ended."""
        return bytes(self._rest)

    def broken(self, last: bytes) -> bytes:
        """Return the last bytes of a broken stream, whose `last` event reports the break."""
        return (_END if self._begun else b"") + last
