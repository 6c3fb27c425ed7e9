"""A double of a server with a cache of whole answers, in front of a real server that reads the
images: what its names for requests leave out is a planted fault for `saccade prove` to find.

Owns the faults. Knows nothing of the cases that find them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import httpx
import numpy as np
from blake3 import blake3
from PIL import Image

from saccade_bench.prove import pictures

Name = Callable[[bytes], bytes]
Field = Literal["model", "cache_salt", "mm_processor_kwargs"]
BLOCK = 16
RESTART = "/restart"
"""A POST to this path is what a restart changes."""


@dataclass(frozen=True)
class Fault:
    """`name`: of an image's file. `ignored`: fields of a request that the cache does not heed.
    `sorted_images`: it does not heed their order; `any_kind`: nor if a frame is an image's or a
    video's; `by_url`: nor what lies at a URL, or ("guessed") at one that may be kept. `by_uuid`: a
    client's own name is an image's, or ("alone") any client's where no image comes along. `slots`:
    answers are kept in so many, each taken by newer requests while the older name still leads
    there. `shared`: requests at once share what they ask. `long_text`: images before a text of so
    many characters are not heeded. `whole`: nor is the part of an image that is to be shown.
    `counted`: images are named by a count that begins again with a restart, answers are kept.
    `blind_tools`: the images of tools are left out, which confuses none.
    """

    name: Name
    ignored: tuple[Field, ...] = ()
    sorted_images: bool = False
    any_kind: bool = False
    by_url: Literal["always", "guessed", "without query", ""] = ""
    by_uuid: Literal["always", "alone", ""] = ""
    slots: int = 1 << 30
    shared: bool = False
    long_text: int = 1 << 30
    whole: bool = False
    adjacent: bool = False
    tools: bool = False
    first_frame: bool = False
    leaks: bool = False
    counted: bool = False
    blind_tools: bool = False


def by_bytes(encoded: bytes) -> bytes:
    """No fault."""
    return blake3(encoded).digest()


def few_bits(bits: int) -> Name:
    def name(encoded: bytes) -> bytes:
        return (int.from_bytes(by_bytes(encoded)[:4], "big") % (1 << bits)).to_bytes(4, "big")

    return name


def by_size(encoded: bytes) -> bytes:
    return by_bytes(str(Image.open(io.BytesIO(encoded)).size).encode())


def by_crc(encoded: bytes) -> bytes:
    return zlib.crc32(encoded).to_bytes(4, "big")


def by_short_hash(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).digest()[:4]


def by_first_tiles(encoded: bytes) -> bytes:
    """All but a screen's lower half."""
    found = pixels_of(encoded)
    return by_bytes(
        found[: len(found) // 2].tobytes() if len(found) == pictures.SCREEN else encoded
    )


def by_samples(encoded: bytes) -> bytes:
    return by_bytes(pixels_of(encoded).tobytes()[:: pictures.STRIDE])


def without_size(encoded: bytes) -> bytes:
    return by_bytes(pixels_of(encoded).tobytes())


def without_palette(encoded: bytes) -> bytes:
    image = Image.open(io.BytesIO(encoded))
    return by_bytes(f"{image.mode} {image.size}".encode() + np.asarray(image).tobytes())


def as_stored(encoded: bytes) -> bytes:
    """Size and colours, without transparency and before EXIF's turn."""
    shown = pixels_of(encoded)
    return by_bytes(str(shown.shape).encode() + shown.tobytes())


def by_blocks(encoded: bytes) -> bytes:
    """Light or dark, by blocks of pixels: what perceptual hashes are made of."""
    shown = pixels_of(encoded).mean(-1)
    height, width = (side // BLOCK * BLOCK for side in shown.shape)
    blocks = shown[:height, :width].reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    return by_bytes(str(shown.shape).encode() + (blocks.mean((1, 3)) // 8).tobytes())


def without_last_byte(encoded: bytes) -> bytes:
    return by_bytes(encoded[:-1])


def by_beginning(encoded: bytes) -> bytes:
    return by_bytes(base64.b64encode(encoded)[:1000])


def pixels_of(encoded: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


@dataclass
class AnswerCache:
    """Answers by the names that a fault makes of requests."""

    fault: Fault
    places: dict[str, int] = field(default_factory=dict)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, name: str) -> dict[str, Any] | None:
        with self.lock:
            return self.answers.get(self.places.get(name, -1))

    def put(self, name: str, answer: dict[str, Any]) -> None:
        with self.lock:
            place = self.places.setdefault(name, len(self.places) % self.fault.slots)
            self.answers[place] = answer

    def name(self, body: Mapping[str, Any]) -> str:
        heeded = ("model", "cache_salt", "mm_processor_kwargs")
        heeded_roles = [each for each in body["messages"] if not self._is_ignored(each)]
        contents = [each["content"] for each in heeded_roles if isinstance(each["content"], list)]
        parts = [part for content in contents for part in content]
        asked = [body.get(each) for each in heeded if each not in self.fault.ignored]
        return json.dumps([self._content(parts), asked])

    def _is_ignored(self, message: Mapping[str, Any]) -> bool:
        return self.fault.tools and message["role"] == "tool"

    def _content(self, parts: list[dict[str, Any]]) -> list[str]:
        shown = [part for part in parts if part["type"] != "text"]
        if self.fault.adjacent:
            shown = shown[:1]  # all images of a prompt have one size here
        names = [each for part in shown for each in self._names(part)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        if sum(map(len, texts)) > self.fault.long_text:
            return texts
        return [*(sorted(names) if self.fault.sorted_images else names), *texts]

    def _names(self, part: Mapping[str, Any]) -> list[str]:
        video, uuid = part["type"] == "video", str(part.get("uuid") or "")
        if uuid and self.fault.by_uuid == "always":
            return [uuid]
        if not video and part.get("image_url", part.get("file")) is None:
            return [self.kept.get(uuid, uuid) if self.fault.by_uuid else f"{uuid} alone"]
        if (file := part.get("file")) is not None:
            named = self._name(file["file_data"])
            return [named, *([] if self.fault.whole else [str((file["page"], file.get("region")))])]
        urls: list[str] = part["video"] if video else [part["image_url"]["url"]]
        if video and self.fault.first_frame:
            urls = urls[:1]
        kind = "video " if video and not self.fault.any_kind else ""
        names = [kind + self._name(url) for url in urls]
        if not (video or self.fault.whole) and "region" in part["image_url"]:
            names.append(str(part["image_url"]["region"]))
        if uuid:
            self.kept[uuid] = names[0]
        return names

    def _name(self, url: str) -> str:
        if self.fault.counted:
            return str(self.counts.setdefault(url, len(self.counts)))
        if url.startswith("data:"):
            return self.fault.name(base64.b64decode(url.partition(",")[2])).hex()
        if self.fault.by_url == "without query":
            return url.partition("?")[0]
        if self.fault.by_url == "always" or url in self.kept:
            return url
        found = httpx.get(url, follow_redirects=True)
        if self.fault.by_url and "cache-control" not in found.headers:
            return self.kept.setdefault(url, url)
        return self.fault.name(found.content).hex()


@contextmanager
def faulty(server: str, fault: Fault, head: str = "", port: int = 0) -> Iterator[str]:
    """A server in front of that at `server` that answers what it has answered before to requests
    of the same name. `head`: a system message that each prompt begins with.
    """
    known = AnswerCache(fault)
    asked: list[Any] = []
    leaked: list[Any] = []
    slot = threading.Lock()

    class Double(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(httpx.get(server + self.path).json())

        def do_POST(self) -> None:
            if self.path == RESTART:
                known.counts.clear()
                self._answer({})
                return
            with slot if fault.leaks else nullcontext():
                self._forward()

        def _forward(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if fault.shared:
                asked[:] = [body]
                time.sleep(0.05)
                (body,) = asked
            if fault.blind_tools:
                for message in body["messages"]:
                    if message["role"] == "tool":
                        message["content"] = ""
            name = known.name(body)
            if head:
                body["messages"].insert(0, {"role": "system", "content": head})
            if body.pop("stream", False):  # `prove` streams only what it aborts
                reply = httpx.post(server + self.path, json=body, timeout=60)
                leaked[:] = [reply.json()]
                self._answer(reply.json())
                return
            if fault.leaks and leaked and known.get(name) is None:
                known.put(name, leaked.pop())
            if (hit := known.get(name)) is None:
                reply = httpx.post(server + self.path, json=body, timeout=60)
                if reply.is_error:
                    self._answer(reply.json(), reply.status_code)
                    return
                hit = reply.json()
                known.put(name, hit)
            else:
                usage = {**hit["usage"]}
                usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens"] - 1}
                hit = {**hit, "usage": usage}
            self._answer(hit)

        def _answer(self, found: Any, status: int = 200) -> None:
            body = json.dumps(found).encode()
            with suppress(BrokenPipeError, ConnectionResetError):  # an aborted request
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Double) as double:
        threading.Thread(target=double.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{double.server_port}"
        finally:
            double.shutdown()
