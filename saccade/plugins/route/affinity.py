"""A request's ranking key, read from its body: its oldest image, else its beginning, and the
replica that keeps the response to continue.

An image's key is the digest of its encoded bytes, sent within the request or uploaded (a file's id
has the digest). For a URL, which the router leaves unfetched, it is the digest of the URL itself.
Only base64 is decoded, and all judgement is left to the worker: it will refuse nonsense, which has
no key. Content after the first image is skipped.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from blake3 import blake3

from saccade.core.decoders import json_decoder
from saccade.edge.related import first_part, name_at_end
from saccade.media.sources.inline import FILE_ID, decode_base64

DEEPEST = 8
"""Lists within lists that are looked into; no API nests images deeper."""
OPENING_CHARACTERS = 4096
"""Maximum characters of a text or URL to hash: growing prompts share their start."""
MAX_VALUES = 1 << 18
"""JSON values of a body that is read; each takes up to some hundred bytes, whatever it says."""
MAX_PARTS = 4096
"""Messages and parts that are looked at in search of an image: some milliseconds' worth. A chat
that shows its first image after so many goes by how it begins.
"""
_SLICE = 1 << 16
HOLDER = re.compile(r"resp_([0-9a-f]{8})[0-9a-f]{40}")
"""A response's id begins with the instance that keeps it (`plugins/responses/store.py`)."""
_INLINE = re.compile(r"data:[^,]{0,505};base64,", re.IGNORECASE)
_DIGEST = re.compile(r"(?:blake3|sha256)-([0-9a-f]{64})")
_URL = re.compile(r"(?:https?|file):", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AffinityKey:
    """A request's ranking keys."""

    keys: tuple[bytes, ...] = ()  # the oldest first
    # the instance that keeps the response to continue or to show, or "" without one
    holder: str = ""

    def blind(self) -> AffinityKey:
        """Return keys that leave the replica open, except for content kept by one replica alone."""
        return AffinityKey((secrets.token_bytes(8),), self.holder)


class _Body(msgspec.Struct):
    """All APIs' relevant fields. Messages stay JSON until used."""

    messages: list[msgspec.Raw] | None = None
    documents: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    input: str | list[msgspec.Raw] | None = None
    prompt: Any = None
    system: Any = None
    instructions: Any = None
    previous_response_id: Any = None
    cache_salt: Any = None
    prompt_cache_key: Any = None


_read = json_decoder(_Body).decode
_read_list = json_decoder(list[msgspec.Raw]).decode


def bearing_of_path(path: str) -> AffinityKey:
    """Return the keys for a request without a body, by its path."""
    name = path.rstrip("/").split("/")
    for part in name[3:5]:
        if (held := HOLDER.fullmatch(part)) is not None:
            return AffinityKey(holder=held[1])
        if (key := _file_key(part)) is not None:
            return AffinityKey((key,))
    return AffinityKey()


def bearing_of_body(body: bytes | bytearray) -> AffinityKey:
    """Return the keys for a request by its JSON, in any API.

    Takes time in proportion to the body, and memory in proportion to its texts.
    """
    if body.startswith(b"--"):  # its parts are images, which the first part names
        body = bytes(first_part(body))
    if len(body) > MAX_VALUES and _has_too_many_values(body):
        return AffinityKey()
    try:
        asked = _read(body)
        # Of text, the first user's message: what comes before is often the same for everybody.
        messages = asked.messages if asked.messages is not None else asked.input
        for listed in (asked.documents, asked.inputs):  # of ranks and of Cohere's embeddings
            if messages is None and bytes(memoryview(listed)[:1]) == b"[":
                messages = _read_list(listed)
        key = _key_of(asked, messages)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return AffinityKey()
    before = asked.previous_response_id
    held = HOLDER.fullmatch(before) if isinstance(before, str) else None
    return AffinityKey(() if key is None else (key,), "" if held is None else held[1])


def _has_too_many_values(body: bytes | bytearray) -> bool:
    """Return True for a body of too many values.

    They are counted a slice at a time, so that other threads run in between.
    """
    count = 0
    for start in range(0, len(body), _SLICE):
        end = start + _SLICE
        for sign in (b",", b"[", b"{"):
            if (at := body.find(sign, start, end)) >= 0:  # to count takes ten times as long
                count += body.count(sign, at, end)
        if count > MAX_VALUES:
            return True
    return False


def _key_of(asked: _Body, messages: str | Sequence[msgspec.Raw] | None) -> bytes | None:
    if isinstance(messages, str):
        return _opening(asked, [messages])
    opening: list[str] = []
    complete = False
    left = MAX_PARTS
    for raw in messages or ():
        message = msgspec.json.decode(raw)
        for part in islice(_parts(message, DEEPEST), left):
            left -= 1
            if isinstance(part, dict) and (key := _image(part)) is not None:
                return key
        if isinstance(message, str) and asked.messages is None and not complete:
            opening.append(message)
            complete = True
        elif isinstance(message, dict) and not complete:
            opening += _texts(message)
            complete = message.get("role") == "user"
        if not left:
            break
    if messages is None:
        opening += _texts({"content": asked.prompt})
    return _opening(asked, opening) if opening else None


def _opening(asked: _Body, texts: Sequence[str]) -> bytes:
    """Hash the texts before every round of a chat, which separate its cache."""
    named = [asked.cache_salt, asked.prompt_cache_key]
    before = _texts({"content": asked.system}) + _texts({"content": asked.instructions})
    said = [str(name) for name in named if name is not None] + before + list(texts)
    return blake3(msgspec.json.encode([text[:OPENING_CHARACTERS] for text in said])).digest()


def _texts(message: dict[str, Any]) -> list[str]:
    """Return a message's texts, without marks and names, which may change between rounds."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return []
    if content and all(isinstance(token, int) for token in content[:OPENING_CHARACTERS]):
        return [" ".join(map(str, content[:OPENING_CHARACTERS]))]
    parts = content[:MAX_PARTS]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


# ---- images


def _parts(part: object, depth: int) -> Iterator[object]:
    yield part
    if depth == 0:
        return
    if isinstance(part, list):
        for each in part:
            yield from _parts(each, depth - 1)
    elif isinstance(part, dict):
        for nested in ("content", "output"):
            if nested in part:
                yield from _parts(part[nested], depth - 1)


def _image(part: dict[str, Any]) -> bytes | None:
    """Return an image part's key, in any API's form, or `None` for other parts."""
    name = part.get("uuid")
    if isinstance(name, str):  # under which alone the image may come again, where it is cached
        return blake3(name.encode()).digest()
    for field in ("image_url", "image", "image_file", "file", "source"):
        value = part.get(field)
        if isinstance(value, str):
            return _source_key(value, bare=True)
        if isinstance(value, dict):
            return _image_of(value)
    return _image_of(part) if part.get("type") in ("input_image", "input_file") else None


def _image_of(value: dict[str, Any]) -> bytes | None:
    for field in ("file_id", "digest", "url", "file_data", "file_url", "data"):
        given = value.get(field)
        if isinstance(given, str):
            return _source_key(given, bare=field not in ("url", "file_url"))
    return None


def _source_key(given: str, bare: bool) -> bytes:
    given = given.strip()
    if (file := _file_key(given) or _digest_key(given)) is not None:
        return file
    if (name := name_at_end(given)) is not None:
        return bytes.fromhex(name.partition("-")[2])
    inline = _INLINE.match(given, 0, 512)
    try:
        if (
            not given.isascii()
        ):  # no base64: each step towards it would be a copy of wide characters
            raise ValueError
        if inline is not None:
            return blake3(decode_base64(given, inline.end())).digest()
        if bare and _URL.match(given) is None:
            return blake3(decode_base64(given)).digest()
    except ValueError:
        pass
    return blake3(given[:OPENING_CHARACTERS].encode("utf-8", "surrogatepass")).digest()


def _digest_key(given: str) -> bytes | None:
    found = _DIGEST.fullmatch(given)
    return None if found is None else bytes.fromhex(found[1])


def _file_key(given: str) -> bytes | None:
    found = FILE_ID.fullmatch(given)
    return None if found is None else bytes.fromhex(found[1])
