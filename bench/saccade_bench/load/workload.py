"""The requests to send: sessions of turns, serialized to JSON before the clock starts.

Each image is generated and encoded once, in a thread pool (Pillow releases the GIL).
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import PIL.Image
from blake3 import blake3

from saccade.core.errors import ConfigError
from saccade_bench.image_files import data_url
from saccade_bench.load.clips import DrawnClip, clip_parts, clip_url
from saccade_bench.load.images import DrawnImage, encode

Json = dict[str, Any]

ORIENTATION, LYING = 0x0112, 5
"""The EXIF orientation tag, and its first value that swaps width and height."""


@dataclass(frozen=True, slots=True)
class File:
    """An existing image file and its format ("jpeg", "png")."""

    encoded: bytes
    kind: str


Drawn = DrawnImage | DrawnClip | File
TurnPart = str | Drawn


@dataclass(frozen=True, slots=True)
class Turn:
    """One question: the parts of a user message, the maximum answer length in tokens, and the
    expected answer if it is known.

    `before` are messages sent before the question (a system message or an earlier chat). `think` is
    a delay in seconds before it is sent.
    """

    parts: tuple[TurnPart, ...]
    max_tokens: int
    think: float = 0.0
    expected: str | None = None
    before: tuple[Json, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one chat. Each sends all earlier turns and their answers again, unless `alone`.

    If `keep_images` > 0, only the images of the last `keep_images` turns are sent again. `due` is
    the session's start, in seconds after the start of the run. If None, it is decided by the
    arrival process.
    """

    turns: tuple[Turn, ...]
    tenant: str = ""
    keep_images: int = 0
    due: float | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn as JSON: its messages with images (`full`) and without (`slim`).

    `seen` of its `images` images were already part of an earlier turn or session.
    """

    full: bytes
    slim: bytes
    max_tokens: int
    think: float
    expected: str | None
    images: int
    seen: int
    text_chars: int


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A session that is ready to send."""

    turns: tuple[PreparedTurn, ...]
    tenant: str
    keep_images: int
    due: float | None
    alone: bool


@dataclass(frozen=True, slots=True)
class Template:
    """The constant parts of all request bodies. `max_tokens`, tenant and messages are inserted."""

    head: bytes

    @staticmethod
    def build(model: str, extra: Mapping[str, Any], ignore_eos: bool, trace: bool) -> Template:
        fields: Json = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        if ignore_eos:
            fields["ignore_eos"] = True
        if trace:
            fields["saccade"] = {"trace": True}
        fields.update(extra)
        return Template(json.dumps(fields).encode()[:-1])

    def body(self, chat: PreparedChat, turn: int, answers: Sequence[bytes]) -> bytes:
        """Return the body of a chat's turn, given the earlier answers as JSON messages."""
        now = chat.turns[turn]
        salt = f', "cache_salt": {json.dumps(chat.tenant)}'.encode() if chat.tenant else b""
        messages: list[bytes] = []
        for index, earlier in enumerate(() if chat.alone else chat.turns[:turn]):
            old = chat.keep_images and index <= turn - chat.keep_images
            messages += (earlier.slim if old else earlier.full, answers[index])
        messages.append(now.full)
        fields = b', "max_tokens": %d' % now.max_tokens
        return b"".join((self.head, fields, salt, b', "messages": [', b", ".join(messages), b"]}"))


def parse_extra(text: str) -> Json:
    """Parse --extra-request-body. Raises ConfigError."""
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-request-body: not JSON ({error})") from None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-request-body: expected a JSON object")
    return extra


def answer_message(text: str) -> bytes:
    return json.dumps({"role": "assistant", "content": text}).encode()


def user_message(parts: Sequence[TurnPart], url: Callable[[Drawn], str]) -> Json:
    """Return a user message in OpenAI's format: plain text, or parts with data URLs if it has
    images or clips.
    """
    if all(isinstance(part, str) for part in parts):
        return {"role": "user", "content": "\n".join(str(part) for part in parts)}
    content: list[Json] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif isinstance(part, DrawnClip):
            content += clip_parts(part, url)
        else:
            content.append({"type": "image_url", "image_url": {"url": url(part)}})
    return {"role": "user", "content": content}


def pieces(part: Drawn) -> tuple[object, ...]:
    """Return everything that a server may have cached: an image, or the frame pairs of a clip."""
    return part.pieces() if isinstance(part, DrawnClip) else (part,)


def files(part: Drawn) -> tuple[Drawn, ...]:
    """Return the files in which a part is sent."""
    return part.frames if isinstance(part, DrawnClip) and part.form != "file" else (part,)


def url_of(part: Drawn) -> str:
    if isinstance(part, DrawnClip):
        return clip_url(part)
    if isinstance(part, File):
        return data_url(part.encoded, f"image/{part.kind}")
    return data_url(encode(part), f"image/{part.format}")


def outline(turn: PreparedTurn) -> list[Json]:
    """Return a turn's messages with {"type": "image", digest, width, height, bytes} for every
    image: enough for a replay without pixels. Servers and routers compute the same digests.
    """
    messages: list[Json] = json.loads(b"[" + turn.full + b"]")
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = [_outlined(part) for part in message["content"]]
    return messages


def _outlined(part: Json) -> Json:
    if part.get("type") in ("video", "video_url"):
        # Replays do not support videos.
        return {"type": "text", "text": f"[video {blake3(json.dumps(part).encode()).hexdigest()}]"}
    if part.get("type") != "image_url":
        return part
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    with PIL.Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if image.getexif().get(ORIENTATION, 1) >= LYING:
            width, height = height, width
    return {
        "type": "image",
        "digest": blake3(data).hexdigest(),
        "width": width,
        "height": height,
        "bytes": len(data),
    }


def prepare(
    sessions: Sequence[Session], progress: Callable[[int, int], None] | None = None
) -> tuple[PreparedChat, ...]:
    """Serialize sessions. `progress(done, total)` counts the distinct files to encode."""
    images = list(
        dict.fromkeys(
            file
            for session in sessions
            for turn in session.turns
            for part in turn.parts
            if not isinstance(part, str)
            for file in files(part)
        )
    )
    urls: dict[Drawn, str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for image, url in zip(images, pool.map(url_of, images), strict=True):
            urls[image] = url
            if progress:
                progress(len(urls), len(images))
    seen: set[tuple[str, object]] = set()
    return tuple(_prepare_session(session, urls, seen) for session in sessions)


def _prepare_session(
    session: Session,
    urls: Mapping[Drawn, str],
    seen: set[tuple[str, object]],
) -> PreparedChat:
    turns: list[PreparedTurn] = []
    counts: list[int] = []  # images of each turn
    chars = 0
    for number, turn in enumerate(session.turns):
        drawn = [part for part in turn.parts if not isinstance(part, str)]
        keys = [(session.tenant, piece) for part in drawn for piece in pieces(part)]
        repeats = sum(key in seen or key in keys[:i] for i, key in enumerate(keys))
        seen.update(keys)
        counts.append(len(keys) + _count_images(turn.before))
        first = max(0, number - session.keep_images + 1) if session.keep_images else 0
        first, chars = (number, 0) if session.alone else (first, chars)
        full = [*turn.before, user_message(turn.parts, urls.__getitem__)]
        slim = [
            *turn.before,
            user_message(
                [part if isinstance(part, str) else "[picture]" for part in turn.parts],
                urls.__getitem__,
            ),
        ]
        chars += _text_chars(full)
        turns.append(
            PreparedTurn(
                full=_join(full),
                slim=_join(slim),
                max_tokens=turn.max_tokens,
                think=turn.think,
                expected=turn.expected,
                images=sum(counts[first:]),
                seen=sum(counts[first:-1]) + repeats,
                text_chars=chars,
            )
        )
    return PreparedChat(
        tuple(turns), session.tenant, session.keep_images, session.due, session.alone
    )


def _join(messages: Iterable[Json]) -> bytes:
    return b", ".join(json.dumps(message, ensure_ascii=False).encode() for message in messages)


def _parts(messages: Iterable[Json]) -> Iterable[Json]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from content
        elif isinstance(content, str):
            yield {"type": "text", "text": content}


def _text_chars(messages: Iterable[Json]) -> int:
    return sum(len(part["text"]) for part in _parts(messages) if part.get("type") == "text")


def _count_images(messages: Iterable[Json]) -> int:
    return sum(part.get("type") == "image_url" for part in _parts(messages))
