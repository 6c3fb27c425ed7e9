"""OpenAI's Files API: upload a picture once, then name it by its id in any number of messages.

Owns the shapes and the reading of multipart bodies. What is kept, and where, is `media/files.py`'s
business.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
from msgspec import Struct
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from saccade.core.errors import InvalidRequest
from saccade.media.files import Stored
from saccade.media.media import Media
from saccade.server.body import Bodies, pieces

Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
DATA = ("batch", "evals", "fine-tune")
"""Purposes of files that are no pictures: they are kept as they come."""

SHORTEST, LONGEST = 3600, 30 * 24 * 3600
"""Bounds of `expires_after`, in seconds; OpenAI's."""
MOST_LISTED = 10_000


class FileObject(Struct):
    """One uploaded file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None
    object: str = "file"
    status: str = "processed"

    @classmethod
    def of(cls, stored: Stored) -> FileObject:
        return cls(
            stored.id,
            stored.nbytes,
            stored.created // 10**9,
            stored.name,
            stored.purpose,
            stored.expires,
        )


class FileList(Struct):
    """A page of the list."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class FileDeleted(Struct):
    """DELETE /v1/files/ID."""

    id: str
    object: str = "file"
    deleted: bool = True


def file_routes(media: Media, bodies: Bodies, largest: int) -> list[Route]:
    """`largest`: bytes of a body."""
    files = _Files(media, bodies, largest)
    return [
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/{id}", files.retrieve, methods=["GET"]),
        Route("/v1/files/{id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.content, methods=["GET"]),
    ]


@dataclass(frozen=True, slots=True)
class _Files:
    """The handlers."""

    media: Media
    bodies: Bodies
    largest: int

    async def create(self, request: Request) -> Response:
        with self.bodies.hold(request, self.largest) as held:
            async with aclosing(pieces(request, held, self.largest)) as body:
                form = await _parse(request, body)
            try:
                purpose, lifetime = _purpose(form), _lifetime(form)
                file = form.get("file")
                if not isinstance(file, UploadFile):
                    raise InvalidRequest(
                        "file: this parameter is required, as a file",
                        "file",
                        "missing_required_parameter",
                    )
                name, data = file.filename or "upload", await file.read()
            finally:
                await form.close()
            if purpose not in DATA:
                await self.media.check(data, "file")
            save = self.media.files.save
            return _json(
                FileObject.of(await asyncio.to_thread(save, data, name, purpose, lifetime))
            )

    async def list(self, request: Request) -> Response:
        query = request.query_params
        limit, order = query.get("limit", str(MOST_LISTED)), query.get("order", "desc")
        if not limit.isdigit() or not 1 <= int(limit) <= MOST_LISTED:
            raise InvalidRequest(f"limit is {limit[:20]!r}; it must be 1 to {MOST_LISTED}", "limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f'order is {order[:20]!r}; it must be "asc" or "desc"', "order")
        found = await asyncio.to_thread(self.media.files.entries)
        if order == "desc":
            found.reverse()
        if after := query.get("after"):
            place = next((i for i, stored in enumerate(found) if stored.id == after), None)
            if place is None:
                raise InvalidRequest(f"after: there is no file {after[:200]!r}", "after")
            found = found[place + 1 :]
        found = [
            stored for stored in found if stored.purpose == query.get("purpose", stored.purpose)
        ]
        page = [FileObject.of(stored) for stored in found[: int(limit)]]
        return _json(
            FileList(
                page,
                page[0].id if page else None,
                page[-1].id if page else None,
                len(found) > len(page),
            )
        )

    async def retrieve(self, request: Request) -> Response:
        return _json(
            FileObject.of(await asyncio.to_thread(self.media.files.find, request.path_params["id"]))
        )

    async def content(self, request: Request) -> Response:
        data = await asyncio.to_thread(self.media.files.read, request.path_params["id"])
        # Whatever it is, a browser shall not run it.
        return Response(
            data,
            media_type="application/octet-stream",
            headers={"x-content-type-options": "nosniff"},
        )

    async def delete(self, request: Request) -> Response:
        await asyncio.to_thread(self.media.files.delete, request.path_params["id"])
        return _json(FileDeleted(request.path_params["id"]))


async def _parse(request: Request, body: object) -> FormData:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise InvalidRequest(
            f"Content-Type is {kind or 'missing'}; this path takes multipart/form-data",
            code="unsupported_media_type",
        )
    try:
        return await MultiPartParser(request.headers, body, max_files=1, max_fields=8).parse()  # type: ignore[arg-type]
    except MultiPartException as error:
        raise InvalidRequest(
            f"the body is not valid multipart/form-data: {error.message}", code="invalid_multipart"
        ) from None


def _purpose(form: FormData) -> str:
    if unknown := set(form) - {
        "file",
        "purpose",
        "expires_after[anchor]",
        "expires_after[seconds]",
    }:
        name = sorted(unknown)[0]
        raise InvalidRequest(
            f"{name}: this parameter is not supported", name, "unsupported_parameter"
        )
    purpose = form.get("purpose")
    if purpose is None:
        raise InvalidRequest(
            "purpose: this parameter is required", "purpose", "missing_required_parameter"
        )
    if purpose not in get_args(Purpose):
        raise InvalidRequest(
            f"purpose is {str(purpose)[:40]!r}; it must be one of {', '.join(get_args(Purpose))}",
            "purpose",
        )
    return str(purpose)


def _lifetime(form: FormData) -> int | None:
    """Seconds that the file is to be kept; None: until it is deleted."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest('expires_after[anchor] must be "created_at"', "expires_after")
    if (
        not isinstance(seconds, str)
        or not seconds.isdecimal()
        or not SHORTEST <= int(seconds) <= LONGEST
    ):
        raise InvalidRequest(
            f"expires_after[seconds] must be {SHORTEST} to {LONGEST}", "expires_after"
        )
    return int(seconds)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
