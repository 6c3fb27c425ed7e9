"""Forwards a stream of server-sent events. Complete events are forwarded immediately, and an
incomplete one is buffered, so that clients only get complete events if a worker disconnects.
"""

from __future__ import annotations

_END = b"\n\n"
MAX_WAITING = 1 << 18
"""Maximum buffered bytes of an incomplete event. Larger events are forwarded in parts."""


class Events:
    """Splits one stream into complete events, and buffers the incomplete remainder."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._begun = False  # whether part of an event was forwarded

    def feed(self, piece: bytes) -> bytes:
        """Add bytes of the stream, and return the bytes that can be forwarded."""
        seen = max(0, len(self._rest) - len(_END) + 1)
        self._rest += piece
        at = self._rest.rfind(_END, seen)
        if at >= 0:
            size = at + len(_END)
            self._begun = False
        elif len(self._rest) > MAX_WAITING:
            size = len(self._rest) - len(_END) + 1  # the end marker may be split
            self._begun = True
        else:
            return b""
        whole = bytes(self._rest[:size])
        del self._rest[:size]
        return whole

    def flush(self) -> bytes:
        """Return the remaining bytes at the end of the stream."""
        return bytes(self._rest)

    def broken(self, last: bytes) -> bytes:
        """Return the last bytes of a stream that was interrupted.

        last: an event with the error, which is added at the end.
        """
        return (_END if self._begun else b"") + last
