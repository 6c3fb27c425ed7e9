"""Requests for every worker: uploaded files, their deletion, and flushed caches.

An upload has one id everywhere: the id holds the content's digest, and its random end is chosen by
the router. Either all ready workers keep the file, or it is taken back.
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
"""Methods and paths; one that ends in / stands for all below it."""
MAX_ANSWER = 1 << 20
"""Bytes of an answer to these; none is longer."""


def is_for_everyone(method: str, path: str) -> bool:
    begin = "/v1/files/" if path.startswith("/v1/files/") else path
    return (method, begin) in EVERYONE


@dataclass(frozen=True, slots=True)
class _Said:
    """A worker's whole answer."""

    replica: Backend
    head: Head
    body: bytes

    @property
    def good(self) -> bool:
        return self.head.status < 300


async def broadcast(fleet: Fleet, scope: Scope, body: bytearray, send: Send) -> None:
    """Send the request to all ready workers, and one of their answers to the client.

    An upload refused by any worker is taken back from the rest, and refused. A file counts as
    deleted if any worker has deleted it. Raises ReplicaLost if all have died.
    """
    upload = (scope["method"], scope["path"]) == UPLOAD
    extra = [(SUFFIX_HEADER.encode(), secrets.token_hex(4).encode())] if upload else []
    asking = (_ask(fleet, each, scope, body, extra) for each in fleet.ready)
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


async def _ask(
    fleet: Fleet,
    replica: Backend,
    scope: Scope,
    body: bytearray,
    extra: Sequence[tuple[bytes, bytes]] = (),
) -> _Said | None:
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
    return _Said(replica, answer, bytes(received))


async def _take_back(fleet: Fleet, scope: Scope, kept: Sequence[_Said]) -> None:
    """Delete an upload that some worker could not keep."""
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
    await asyncio.gather(*(_ask(fleet, said.replica, delete, bytearray()) for said in kept))
