"""Reads from the body of a request the key with which workers are ranked: the key of its first
image, or else of the start of its text. It also reads which worker stores the previous response, if
the request continues one.

The key of an image is the digest of its encoded bytes, which are in the request or were uploaded (a
file's id contains the digest). The router does not fetch URLs, so the key of a URL is the digest of
the URL. Only base64 is decoded. Malformed requests have no key, and the worker rejects them.
Content after the first image is not read.
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
"""Maximum depth of nested content that is searched for an image. No API nests images more
deeply.
"""
OPENING_CHARACTERS = 4096
"""Maximum characters of a string or URL that are hashed. Prompts that grow share their start."""
MAX_VALUES = 1 << 18
"""Maximum JSON values in a body that is parsed. Each value can take a hundred bytes of memory."""
MAX_PARTS = 4096
"""Maximum messages and parts that are searched for an image, which takes some milliseconds. If the
first image of a chat comes later, the chat is ranked by its text.
"""
_SLICE = 1 << 16
HOLDER = re.compile(r"resp_([0-9a-f]{8})[0-9a-f]{40}")
"""Matches the id of a response, which starts with the server instance that stores it
(`plugins/responses/store.py`).
"""
_INLINE = re.compile(r"data:[^,]{0,505};base64,", re.IGNORECASE)
_DIGEST = re.compile(r"(?:blake3|sha256)-([0-9a-f]{64})")
_URL = re.compile(r"(?:https?|file):", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AffinityKey:
    """Determines the order in which workers are tried for a request."""

    keys: tuple[bytes, ...] = ()
    # The server instance that stores the response to continue or to retrieve, or "".
    holder: str = ""

    def blind(self) -> AffinityKey:
        """Return a random key, to ignore affinity. `holder` stays the same, since only that
        instance has the response.
        """
        return AffinityKey((secrets.token_bytes(8),), self.holder)


class _Body(msgspec.Struct):
    """The fields of a body, in any API, that affect the key. Messages are decoded when they are
    needed.
    """

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
    """Return the key of a request without a body, from its path."""
    name = path.rstrip("/").split("/")
    for part in name[3:5]:
        if (held := HOLDER.fullmatch(part)) is not None:
            return AffinityKey(holder=held[1])
        if (key := _file_key(part)) is not None:
            return AffinityKey((key,))
    return AffinityKey()


def bearing_of_body(body: bytes | bytearray) -> AffinityKey:
    """Return the key of a request from its JSON body, in any API.

    The time is proportional to the body, and the memory is proportional to the body's texts.
    """
    if body.startswith(b"--"):  # multipart: the first part is the JSON, and the others are images
        body = bytes(first_part(body))
    if len(body) > MAX_VALUES and _has_too_many_values(body):
        return AffinityKey()
    try:
        asked = _read(body)
        # Use text up to the first user message, since a system prompt is often the same in all
        # chats.
        messages = asked.messages if asked.messages is not None else asked.input
        # of rerank requests and of Cohere's embeddings
        for listed in (asked.documents, asked.inputs):
            if messages is None and bytes(memoryview(listed)[:1]) == b"[":
                messages = _read_list(listed)
        key = _key_of(asked, messages)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return AffinityKey()
    before = asked.previous_response_id
    held = HOLDER.fullmatch(before) if isinstance(before, str) else None
    return AffinityKey(() if key is None else (key,), "" if held is None else held[1])


def _has_too_many_values(body: bytes | bytearray) -> bool:
    """Return True if a body may have more than `MAX_VALUES` JSON values. Counts them in slices, so
    that other threads can run in between.
    """
    count = 0
    for start in range(0, len(body), _SLICE):
        end = start + _SLICE
        for sign in (b",", b"[", b"{"):
            if (at := body.find(sign, start, end)) >= 0:  # searching first is ten times faster
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
    """Hash the texts at the start of a chat, and the fields that separate caches. Both are the same
    in all rounds of the chat.
    """
    named = [asked.cache_salt, asked.prompt_cache_key]
    before = _texts({"content": asked.system}) + _texts({"content": asked.instructions})
    said = [str(name) for name in named if name is not None] + before + list(texts)
    return blake3(msgspec.json.encode([text[:OPENING_CHARACTERS] for text in said])).digest()


def _texts(message: dict[str, Any]) -> list[str]:
    """Return the texts in a message, which stay the same in all rounds of a chat, unlike its other
    fields.
    """
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
    """Return the key of an image part in any API's format, or `None` for other parts."""
    name = part.get("uuid")
    if isinstance(name, str):  # a later request may contain only the uuid
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
        if not given.isascii():  # not base64, and trying to decode it would copy wide characters
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
