"""Converts tokens to text incrementally, and finds stop strings.

Each update of a response contains only complete characters. All updates together are the text that
decoding all tokens at once would return.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenizers import Tokenizer as Backend

from saccade.core.byte_pairs import BYTE_OF
from saccade.core.errors import CheckpointError

_SPACE = "\u2581"  # how SentencePiece writes a space


class Vocabulary:
    """Maps each token to the bytes that the tokenizer's decoder would return for it.

    Supports byte-level BPE (each character of a token stands for a byte) and SentencePiece BPE
    (U+2581 stands for a space, and `<0xE4>` for a byte).
    """

    def __init__(self, backend: Backend) -> None:
        """Read the tokenizer's decoder. Raises CheckpointError if its type is not supported."""
        decoder = (
            json.loads(backend.decoder.__getstate__())
            if backend.decoder is not None
            else {"type": None}
        )
        kinds = {step["type"] for step in decoder.get("decoders", [decoder])}
        if not kinds <= {"ByteLevel"} and not kinds <= {
            "Replace",
            "ByteFallback",
            "Fuse",
            "Strip",
            "Metaspace",
        }:
            raise CheckpointError(
                f"tokenizer.json: a decoder of type {', '.join(sorted(map(str, kinds)))} is "
                "not supported"
            )
        self._backend = backend
        self._byte_level = kinds == {"ByteLevel"}
        self.strips_first_space = bool(kinds & {"Strip", "Metaspace"})
        self.special = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = dict.fromkeys(self.special, b"")
        self._named: dict[frozenset[str], Mapping[int, bytes]] = {frozenset(): {}}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token's text. They are empty for special tokens and unknown ids."""
        known = self._bytes.get(token)
        if known is None:
            piece = self._backend.id_to_token(token)
            known = self._bytes[token] = b"" if piece is None else self._read(piece)
        return known

    def name_of(self, token: int) -> bytes:
        """Return the name of a special token as bytes, or the bytes of another token's text. Used
        for log-probabilities.
        """
        return (
            (self._backend.id_to_token(token) or "").encode()
            if token in self.special
            else self.bytes_of(token)
        )

    def named(self, names: frozenset[str]) -> Mapping[int, bytes]:
        """Return the special tokens with these names: their names as bytes, by id."""
        if (known := self._named.get(names)) is None:
            ids = {self._backend.token_to_id(name): name.encode() for name in names}
            known = {token: ids[token] for token in self.special & ids.keys()}
            self._named[names] = known
        return known

    def _read(self, piece: str) -> bytes:
        if not self._byte_level:
            is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
            return bytes.fromhex(piece[3:5]) if is_byte else piece.replace(_SPACE, " ").encode()
        try:
            return bytes(BYTE_OF[character] for character in piece)
        except KeyError:  # an added token, which is not byte-level
            return piece.encode()


class Detokenizer:
    """Converts the tokens of one response to text, update by update, with constant work per
    token.
    """

    def __init__(
        self, vocabulary: Vocabulary, special: bool = False, tags: frozenset[str] = frozenset()
    ) -> None:
        """Start a response.

        special: include the names of all special tokens in the text. Otherwise, only those in
        `tags` are included.
        """
        shown, bytes_of = vocabulary.named(tags), vocabulary.bytes_of
        self._bytes_of: Callable[[int], bytes] = bytes_of
        if special:
            self._bytes_of = vocabulary.name_of
        elif shown:
            self._bytes_of = lambda token: shown.get(token) or bytes_of(token)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = vocabulary.strips_first_space

    def feed(self, tokens: Iterable[int]) -> str:
        """Add tokens, and return the characters that are now complete."""
        return self._stripped(self._decoder.decode(b"".join(map(self._bytes_of, tokens))))

    def end(self) -> str:
        """Return the rest of the text at the end of the response: U+FFFD for an incomplete
        character, or "".
        """
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Finds stop strings in a response, even if they span several updates.

    The first complete stop string ends the response. If several end at the same character, the
    longest is used. The response is the text before it, plus the stop string itself if `kept`. Text
    is held back only while it may be the start of a stop string.
    """

    def __init__(self, stops: Sequence[str], kept: bool = False) -> None:
        """Start a response. `stops` must not contain empty strings."""
        assert all(stops)
        self.found: str | None = None
        """The stop string that ended the response."""
        self._stops = stops
        self._kept = kept
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text. Return the text that belongs to the response, and whether a stop string is
        complete.
        """
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, at, self.found = min(found)
            return text[: end if self._kept else at], True
        safe = min((_partial_match(stop, text) for stop in self._stops), default=len(text))
        self._held = text[safe:]
        return text[:safe], False

    def end(self) -> str:
        """Return the text that was held back. Call this if the response ends without a stop
        string.
        """
        held, self._held = self._held, ""
        return held


def _partial_match(stop: str, text: str) -> int:
    """Return the start of the longest suffix of `text` that is a prefix of `stop`.

    Returns the length of `text` if there is none.
    """
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
