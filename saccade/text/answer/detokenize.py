"""Tokens out, text out: incremental detokenising, and stop strings.

Owns each token's bytes, and the state of one answer's text. A delta holds whole characters. An
answer's deltas add up to the decoding of all its tokens at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenizers import Tokenizer as Backend

from saccade.core.byte_pairs import BYTE_OF
from saccade.core.errors import CheckpointError

_SPACE = "\u2581"  # SentencePiece's visible space


class Vocabulary:
    """Each token's bytes, as the tokenizer's decoder would write them.

    Reads two types of tokenizer: byte-level BPE (each character in a token represents one byte) and
    SentencePiece's BPE (a visible space for a space, `<0xE4>` for a byte).
    """

    def __init__(self, backend: Backend) -> None:
        """Read the tokenizer's decoder. Raises CheckpointError for an unknown kind."""
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
        """Return the bytes that `token` adds to the answer. Special tokens and unknown ids add
        none.
        """
        known = self._bytes.get(token)
        if known is None:
            piece = self._backend.id_to_token(token)
            known = self._bytes[token] = b"" if piece is None else self._read(piece)
        return known

    def name_of(self, token: int) -> bytes:
        """Return a special token's name, as log-probabilities report it, or any other token's
        bytes.
        """
        return (
            (self._backend.id_to_token(token) or "").encode()
            if token in self.special
            else self.bytes_of(token)
        )

    def named(self, names: frozenset[str]) -> Mapping[int, bytes]:
        """Return the special tokens with these names."""
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
        except KeyError:  # an added token, written as it reads
            return piece.encode()


class Detokenizer:
    """One answer's text, delta by delta, with constant work per token."""

    def __init__(
        self, vocabulary: Vocabulary, special: bool = False, tags: frozenset[str] = frozenset()
    ) -> None:
        """Begin an answer.

        special: show all special tokens by name. Otherwise only those named in `tags` are shown.
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
        """Return the whole characters that `tokens` complete."""
        return self._stripped(self._decoder.decode(b"".join(map(self._bytes_of, tokens))))

    def end(self) -> str:
        """Return the text left when the answer ends: U+FFFD after half a character."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Watches an answer for stop strings, across tokens.

    The first complete stop string ends the answer. If several are complete at once, the longest
    counts. The answer is the text before it, plus the stop string itself if `kept`. Only text that
    may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], kept: bool = False) -> None:
        """Watch for `stops`, all non-empty."""
        assert all(stops)
        self.found: str | None = None
        """The one that ended the answer."""
        self._stops = stops
        self._kept = kept
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text certain to be in the answer, and whether a stop string is complete."""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, at, self.found = min(found)
            return text[: end if self._kept else at], True
        safe = min((_beginning(stop, text) for stop in self._stops), default=len(text))
        self._held = text[safe:]
        return text[:safe], False

    def end(self) -> str:
        """Return the held-back text when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _beginning(stop: str, text: str) -> int:
    """Return the start of the longest suffix of `text` that begins `stop`.

    Returns the length of `text` if no suffix does.
    """
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
