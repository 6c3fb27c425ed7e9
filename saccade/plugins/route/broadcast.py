"""Sends requests to all workers: uploads and deletions of files, flushing of caches, and loading of
adapters.

An upload has the same id on all workers: it contains the content's digest, and a random suffix that
the router chooses. If one of the ready workers cannot store the file, the others delete it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Scope, Send

from saccade.core.errors import ReplicaLost
from saccade.edge.headers import SUFFIX_HEADER
from saccade.edge.upstream import Head, WorkerDisconnected
from saccade.plugins.route.fleet import Backend, Fleet
from saccade.plugins.route.heads import answer_headers, request_head

log = logging.getLogger("saccade")

UPLOAD = ("POST", "/v1/files")
EVERYONE = frozenset(
    (
        UPLOAD,
        ("DELETE", "/v1/files/"),
        ("POST", "/flush_cache"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
    )
)
"""The methods and paths of these requests. A path that ends in "/" includes all paths below it."""
MAX_ANSWER = 1 << 20
"""Maximum bytes of a response to one of these requests."""


def is_for_everyone(method: str, path: str) -> bool:
    begin = "/v1/files/" if path.startswith("/v1/files/") else path
    return (method, begin) in EVERYONE


@dataclass(frozen=True, slots=True)
class _WorkerReply:
    """A worker's complete response."""

    replica: Backend
    head: Head
    body: bytes

    @property
    def good(self) -> bool:
        return self.head.status < 300


async def broadcast(fleet: Fleet, scope: Scope, body: bytearray, send: Send) -> None:
    """Send the request to all ready workers, and one of their responses to the client.

    If a worker rejects an upload, the upload is deleted from the others, and the client gets the
    error. A deletion succeeds if any worker has deleted the file. Raises ReplicaLost if all workers
    have disconnected.
    """
    upload = (scope["method"], scope["path"]) == UPLOAD
    extra = [(SUFFIX_HEADER.encode(), secrets.token_hex(4).encode())] if upload else []
    asking = (_request(fleet, each, scope, body, extra) for each in fleet.ready)
    answers = [said for said in await asyncio.gather(*asking) if said is not None]
    if not answers:
        raise ReplicaLost("all workers disconnected before responding: send the request again")
    good = [said for said in answers if said.good]
    bad = [said for said in answers if not said.good]
    if upload and good and bad:
        await _take_back(fleet, scope, good)
    chosen = (bad or good)[0] if scope["method"] == "POST" else (good or bad)[0]
    headers = [pair for pair in answer_headers(chosen.head) if pair[0] != b"content-length"]
    length = (b"content-length", b"%d" % len(chosen.body))
    start = {"type": "http.response.start", "status": chosen.head.status}
    await send({**start, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": chosen.body})


async def _request(
    fleet: Fleet,
    replica: Backend,
    scope: Scope,
    body: bytearray,
    extra: Sequence[tuple[bytes, bytes]] = (),
) -> _WorkerReply | None:
    head = request_head(scope, replica.authority, len(body), extra)
    received = bytearray()
    try:
        with fleet.count(replica):
            exchange = replica.upstream.exchange(scope["method"].encode(), head, body)
            async with exchange as (answer, content):
                async for piece in content:
                    received += piece
                    if len(received) > MAX_ANSWER:
                        raise WorkerDisconnected("its response is too long", begun=True)
    except WorkerDisconnected as gone:
        fleet.lost(replica, str(gone))
        return None
    return _WorkerReply(replica, answer, bytes(received))


async def _take_back(fleet: Fleet, scope: Scope, kept: Sequence[_WorkerReply]) -> None:
    """Delete an upload from the workers that have stored it, because another worker rejected it."""
    try:
        id = str(msgspec.json.decode(kept[0].body)["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        log.warning("an upload that one worker rejected remains on others: the response had no id")
        return
    delete: dict[str, Any] = {
        **scope,
        "method": "DELETE",
        "raw_path": f"/v1/files/{id}".encode(),
        "headers": [pair for pair in scope["headers"] if pair[0] != b"content-type"],
    }
    await asyncio.gather(*(_request(fleet, said.replica, delete, bytearray()) for said in kept))
