"""Builds error responses in the format of the API that the request was sent to.

This module has the statuses, bodies and headers of errors, and the paths of Anthropic's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from saccade.core.errors import Overloaded, RequestError, Unauthorized, UnknownDigests

NOTHING: Mapping[str, Any] = {}
MAX_MESSAGE, MAX_PARAM = 2000, 500
"""Maximum number of characters of an error's message, and of the field that it names."""
_RESPONSES = "/v1/responses"
_ANTHROPIC = "/v1/messages"
_OLLAMA, _GEMINI = "/api/", "/v1beta/"
"""Paths of APIs that are not supported. Errors have the format of these APIs, so that their clients
show the message.
"""
_OVERLOADED = 529
"""The status that Anthropic's API uses instead of 503."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types, by status. Other statuses below 500 have the type of 400, and the rest
`api_error`.
"""


class ErrorBody(Struct):
    """What is wrong, and the field that caused it."""

    message: str
    """What is wrong, the limit, and what to do."""
    type: str
    """The error's kind, such as invalid_request_error or server_error."""
    param: str | None
    code: str | None
    digests: tuple[str, ...] | UnsetType = UNSET
    """With unknown_digests: the digests whose bytes the server does not have."""


class ErrorResponse(Struct):
    """The body of every error."""

    error: ErrorBody

    @classmethod
    def of(cls, error: RequestError) -> ErrorResponse:
        """Build the body of an error response. Long texts are truncated."""
        param = None if error.param is None else _cut(error.param, MAX_PARAM)
        lacking = error.digests if isinstance(error, UnknownDigests) else UNSET
        message = _cut(error.message, MAX_MESSAGE)
        return cls(ErrorBody(message, error.type, param, error.code, lacking))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."


def speaks_anthropic(path: str) -> bool:
    """Return True if the path is in Anthropic's API."""
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def refusal(
    path: str, error: RequestError, request_id: str = ""
) -> tuple[int, dict[str, str], bytes]:
    """Return the status, headers and body of the response for `error`. path: the request's path."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    told = ErrorResponse.of(error).error
    status, body = body_for(path, error.status, told, request_id, error.details)
    return status, headers, body


def body_for(
    path: str, status: int, error: ErrorBody, request_id: str, details: Mapping[str, Any] = NOTHING
) -> tuple[int, bytes]:
    """Return the status and body of an error response in the format of the API that has `path`.

    details: further fields, which are added if the API has a place for them.
    """
    if path.startswith(_OLLAMA):
        return status, msgspec.json.encode({"error": error.message})
    if path.startswith(_GEMINI):
        word = HTTPStatus(status).name
        told_gemini = {"code": status, "message": error.message, "status": word}
        return status, msgspec.json.encode({"error": told_gemini})
    if not speaks_anthropic(path):
        return status, msgspec.json.encode(ErrorResponse(error))
    body = _anthropic(status, error, request_id, details)
    return _OVERLOADED if status == 503 else status, msgspec.json.encode(body)


def failure_event(path: str, error: RequestError, request_id: str) -> bytes:
    """Return the last event of a stream on `path` that fails with `error`."""
    if speaks_anthropic(path):
        data = msgspec.json.encode(error_body(error, request_id))
        return b"event: error\ndata: " + data + b"\n\n"
    body = ErrorResponse.of(error)
    if not path.startswith(_RESPONSES):
        return b"data: " + msgspec.json.encode(body) + b"\n\n"
    event = {"type": "error", "code": body.error.code, "message": body.error.message}
    data = msgspec.json.encode({**event, "param": None, "sequence_number": 0, "error": body.error})
    return b"event: error\ndata: " + data + b"\n\n"


def error_body(error: RequestError, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format, for a response or for the last event of a stream."""
    return _anthropic(error.status, ErrorResponse.of(error).error, request_id, error.details)


def _anthropic(
    status: int, error: ErrorBody, request_id: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an error in Anthropic's format.

    The format has no place for `param`, so the message starts with it. Clients recognize a prompt
    that is too long by the first words of the message, so these come before the field.
    """
    kind = _TYPES.get(status, _TYPES[400] if status < 500 else "api_error")
    details = {} if error.code is None else {"details": {"error_code": error.code, **more}}
    words = [] if error.code != "context_length_exceeded" else ["prompt is too long"]
    words += [] if error.param is None or error.param in error.message else [error.param]
    fields = {"type": kind, "message": ": ".join([*words, error.message]), **details}
    return {"type": "error", "error": fields, "request_id": request_id or None}
