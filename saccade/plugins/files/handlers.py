"""OpenAI's Files API: upload an image once, then refer to it by ID in any number of messages.
Anthropic's clients are recognized by their header, and get responses in Anthropic's format.

This module has the formats of responses, and parses multipart bodies. `store.py` stores the files.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from mimetypes import guess_type
from typing import BinaryIO, Literal, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from saccade.api.mounting import ApiContext
from saccade.api.stored_objects import Paging, whole_number
from saccade.core.client import SHARE, Client
from saccade.core.errors import InvalidRequest, StorageFull
from saccade.edge.body import Bodies, BufferedBody, pieces
from saccade.edge.headers import SUFFIX_HEADER, client_of
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.request_manager import RequestManager
from saccade.media.media import Media
from saccade.media.sent_files import PageSizes, SentFiles
from saccade.plugins.files.store import PIECE, Stored
from saccade.plugins.files.uploads import Uploads, uploads_of
from saccade.plugins.files.warm import read_warm, warm_fields
from saccade.plugins.files.warm_ups import WarmUps

Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
DATA = ("batch", "evals", "fine-tune")
"""Purposes of files that are not images. These files are stored unchanged."""

SHORTEST, LONGEST = 3600, 30 * 24 * 3600
"""The minimum and maximum of `expires_after` in seconds, as in OpenAI's API."""
_SUFFIX = re.compile(r"[0-9a-f]{8}")
MAX_LISTED = 10_000
MAX_FIELDS = 256
"""Maximum fields of a form. SDKs send two fields for each message of a prefix."""
MAX_NAME = 255
"""Maximum characters of a file's name."""

log = logging.getLogger("saccade")
# The library warns about each malformed form. Clients get an error, so this would fill the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class FileObject(Struct):
    """An uploaded file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None
    object: str = "file"
    status: str = "processed"
    pages: int | UnsetType = UNSET
    """The number of pages, in the response to the upload of a PDF."""
    page_sizes: Sequence[tuple[float, float]] | UnsetType = UNSET
    """Each page's width and height in points, upright, in the units of regions."""

    @classmethod
    def of(cls, stored: Stored, pages: PageSizes | None = None) -> FileObject:
        return cls(
            stored.id,
            stored.nbytes,
            stored.created // 10**9,
            stored.name,
            stored.purpose,
            stored.expires,
            pages=UNSET if pages is None else len(pages),
            page_sizes=UNSET if pages is None else [(width, height) for height, width in pages],
        )


class FileMetadata(Struct):
    """An uploaded file in Anthropic's format."""

    id: str
    filename: str
    mime_type: str
    size_bytes: int
    created_at: datetime
    downloadable: bool = True
    type: str = "file"

    @classmethod
    def of(cls, stored: Stored) -> FileMetadata:
        kind, _ = guess_type(stored.name)
        created = datetime.fromtimestamp(stored.created // 10**9, UTC)
        kind = kind or "application/octet-stream"
        return cls(stored.id, stored.name, kind, stored.nbytes, created)


class FileList(Struct):
    """A page of the list."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class FileDeleted(Struct):
    """The response to DELETE /v1/files/ID."""

    id: str
    object: str = "file"
    deleted: bool = True


def file_routes(api: ApiContext) -> list[Route]:
    admission = api.handler.admission
    front = api.handler.front
    warm_ups = WarmUps(front.prepare, front.generate, front.spawn, front.metrics)
    files = _Files(front, admission.bodies, admission.largest, warm_ups)
    return [
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/{id}", files.retrieve, methods=["GET"]),
        Route("/v1/files/{id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.content, methods=["GET"]),
    ]


@dataclass(frozen=True, slots=True)
class _Files:
    """The handlers of /v1/files."""

    front: RequestManager
    bodies: Bodies
    largest: int
    warm_ups: WarmUps

    @property
    def media(self) -> Media:
        return self.front.intake.media

    @property
    def files(self) -> Uploads:
        return uploads_of(self.media)

    async def create(self, request: Request) -> Response:
        with self.bodies.hold(request, self.largest) as held:
            async with aclosing(pieces(request, held, self.largest)) as body:
                form = await _parse(request, body)
            client = held.client
            share = SHARE if client.limited else 1.0
            try:
                usual = "vision" if _is_anthropics(request) else None
                purpose, lifetime = _purpose(form, usual), _lifetime(form)
                warm = self._warm(form, purpose, client)
                file = form.get("file")
                if not isinstance(file, UploadFile):
                    raise InvalidRequest(
                        "file is required: send it as a file of the form",
                        "file",
                        "missing_required_parameter",
                    )
                name, data = _name(file), await file.read()
            except OSError as error:
                raise _no_room(error) from error
            finally:
                await form.close()
            pages = None
            if purpose not in DATA:
                pages = await SentFiles(self.media).check(data, "file", client)
            stored = await self.files.save(
                data, name, purpose, lifetime, client.name, share, _suffix(request)
            )
            if warm is not None:
                self.warm_ups.add(warm(stored.id, data), client)
            return _described(request, stored, pages)

    def _warm(
        self, form: FormData, purpose: str, client: Client
    ) -> Callable[[str, bytes], GenerationRequest] | None:
        """Return a function that builds an upload's warm-up request, or None if the form does not
        request one.

        Raises InvalidRequest, Overloaded or EngineUnavailable.
        """
        found = read_warm(form)
        if found is None:
            return None
        warm, place = found
        if purpose in DATA:
            raise InvalidRequest(
                f"{place}: a file of purpose {purpose} is not shown to the model: omit {place}, "
                'or upload it as "vision" or "user_data"',
                place,
            )
        self.warm_ups.check(client)
        before = warm.messages(self.front.check_ready().context_length, place)
        return partial(warm.question, before)

    async def list(self, request: Request) -> Response:
        query = request.query_params
        paging = Paging.of(query, MAX_LISTED, MAX_LISTED)
        entries = await self.files.entries(_owner(request))
        found = [
            stored
            for stored in paging.rest(entries, lambda stored: stored.id)
            if stored.purpose == query.get("purpose", stored.purpose)
        ]
        page = [FileObject.of(stored) for stored in found[: paging.limit]]
        return _json(
            FileList(
                page,
                page[0].id if page else None,
                page[-1].id if page else None,
                len(found) > len(page),
            )
        )

    async def retrieve(self, request: Request) -> Response:
        found = await self.files.find(request.path_params["id"], _owner(request))
        return _described(request, found)

    async def content(self, request: Request) -> Response:
        file = await self.files.open(request.path_params["id"], _owner(request))
        return _Download(self.files, file, self.bodies.share(client_of(request.scope)))

    async def delete(self, request: Request) -> Response:
        await self.files.delete(request.path_params["id"], _owner(request))
        return _json(FileDeleted(request.path_params["id"]))


def _is_anthropics(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _described(request: Request, stored: Stored, pages: PageSizes | None = None) -> Response:
    if _is_anthropics(request):
        return _json(FileMetadata.of(stored))
    return _json(FileObject.of(stored, pages))


def _suffix(request: Request) -> str | None:
    """Return the suffix of the file's ID that a router has chosen, or None if the request is not
    from a router.
    """
    given = request.headers.get(SUFFIX_HEADER, "")
    return given if _SUFFIX.fullmatch(given) else None


def _owner(request: Request) -> str:
    return client_of(request.scope).name


class _Download(StreamingResponse):
    """Sends a file in chunks, whose memory is counted in `share`. Closes `file` at the end."""

    def __init__(
        self, files: Uploads, file: BinaryIO, share: AbstractContextManager[BufferedBody]
    ) -> None:
        self._file = file
        self._share = share
        super().__init__(
            files.pieces(file),
            media_type="application/octet-stream",
            headers={
                "content-length": str(os.fstat(file.fileno()).st_size),
                "x-content-type-options": "nosniff",  # so that browsers do not execute it
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file, self._share as held:
            held.resize(PIECE)
            await super().__call__(scope, receive, send)


async def _parse(request: Request, body: object) -> FormData:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise InvalidRequest(
            f"Content-Type is {kind or 'missing'}; this endpoint requires multipart/form-data",
            code="unsupported_media_type",
        )
    try:
        most = {"max_files": 1, "max_fields": MAX_FIELDS}
        return await MultiPartParser(request.headers, body, **most).parse()  # type: ignore[arg-type]
    except MultiPartException as error:
        raise InvalidRequest(
            f"the body is not valid multipart/form-data: {error.message}", code="invalid_multipart"
        ) from None
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> StorageFull:
    """Return the error for an upload that is too large for the temporary directory.

    Large uploads are stored there until they are complete.
    """
    log.warning("an upload failed: %s", error)
    return StorageFull(
        f"the server's temporary directory (TMPDIR) rejected the upload: {error.strerror}: nothing "
        "was stored"
    )


def _name(file: UploadFile) -> str:
    name = file.filename or "upload"
    if len(name) > MAX_NAME:
        raise InvalidRequest(
            f"the file's name has {len(name)} characters; the limit is {MAX_NAME}", "file"
        )
    return name


def _purpose(form: FormData, usual: str | None) -> str:
    """Return the file's purpose that the form specifies.

    usual: the default, or None if the purpose is required.
    """
    known = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
    if unknown := set(form) - known - warm_fields(form):
        name = sorted(unknown)[0]
        raise InvalidRequest(
            f"{name}: this parameter is not supported", name, "unsupported_parameter"
        )
    purpose = form.get("purpose", usual)
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
    """Return for how many seconds to store the file, or None if it does not expire."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest('expires_after[anchor] must be "created_at"', "expires_after")
    lifetime = whole_number(seconds, SHORTEST, LONGEST) if isinstance(seconds, str) else None
    if lifetime is None:
        raise InvalidRequest(
            f"expires_after[seconds] must be {SHORTEST} to {LONGEST}", "expires_after"
        )
    return lifetime


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
