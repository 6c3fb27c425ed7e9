"""The exception tree. Whoever meets bad input raises one of these; `server/` turns it into OpenAI's
error shape.

SaccadeError
├── RequestError          the caller's request cannot be served; has an HTTP status
│   ├── InvalidRequest    400  malformed or unsupported
│   │   ├── ImageError    400  an image that cannot be fetched, read or afforded
│   │   │   └── OversizedImages    400  images that may not be downsized, and would be
│   │   └── UnknownDigests 400 a body references bytes that were not sent or no longer stored
│   ├── Unauthorized      401
│   ├── Forbidden         403  a web page that may not use the server
│   ├── NotFound          404
│   ├── TooSlow           408  the request did not arrive in time
│   ├── Cancelled         409  ended early by whoever made it
│   ├── OtherTower        409  the embedding of another vision tower, or settings, is wanted
│   ├── TooLarge          413  over a byte limit
│   ├── UnsupportedMedia  415  a body in an encoding that is not read
│   ├── HeadTooLarge      431  request line and headers over a limit
│   ├── Overloaded        429  admission refused; `retry_after` seconds
│   ├── InternalError     500  a bug; see the log
│   ├── ReplicaLost       502  a router's worker died under the request
│   ├── EngineUnavailable 503  the engine is starting, stopping or dead
│   ├── StorageBusy       503  the folder of uploaded files does not answer
│   └── StorageFull       507  no disk to keep an upload on
└── StartupError               the server cannot start; the message says what to do
    ├── ConfigError            a setting
    └── CheckpointError        a file of the model: names file and tensor
"""

from __future__ import annotations

from typing import Any


class SaccadeError(Exception):
    """Root of everything Saccade raises on purpose."""


class RequestError(SaccadeError):
    """The request cannot be served.

    `param` names the field as the client wrote it, e.g. "messages[2].content[0]".
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code

    @property
    def details(self) -> dict[str, Any]:
        """Return the error's fields in Anthropic's format."""
        return {}


class InvalidRequest(RequestError):
    """400: the request is malformed, or asks for something unsupported."""

    code = "invalid_value"


class ImageError(InvalidRequest):
    """400: an image cannot be fetched, read or afforded. `param` names the message part."""

    code = "invalid_image"


class UnknownDigests(InvalidRequest):
    """400: a body names bytes that its sender has not sent, or that are no longer kept.

    `digests` has all their names.
    """

    code = "unknown_digests"

    def __init__(self, message: str, digests: tuple[str, ...]) -> None:
        super().__init__(message)
        self.digests = digests

    @property
    def details(self) -> dict[str, Any]:
        return {"digests": self.digests}


class OversizedImages(ImageError):
    """400: images that the client wants seen whole are larger than the model sees.

    side: the longest side that fits. places: the images at fault, as the client wrote them.
    """

    code = "image_dimensions_too_large"

    def __init__(self, message: str, side: int, places: list[str]) -> None:
        super().__init__(message, places[0])
        self.side = side
        self.places = places

    @property
    def details(self) -> dict[str, Any]:
        paths = [each.replace("[", ".").replace("]", "") for each in self.places]
        return {"max_side_length_pixels": self.side, "paths": paths}


class Unauthorized(RequestError):
    """401: the API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """403: a web page asks without permission, or by a name foreign to the server."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(RequestError):
    """404: the model, file or path is missing."""

    status = 404
    code = "not_found"


class TooSlow(RequestError):
    """408: the request's headers or body arrived too late."""

    status = 408
    code = "timeout"


class Cancelled(RequestError):
    """409: the client ended the request early."""

    status = 409
    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class OtherTower(RequestError):
    """409: a server asks for an embedding from a different tower, or with different settings."""

    status = 409
    code = "wrong_tower"


class UnsupportedMedia(RequestError):
    """415: the body's encoding is unsupported."""

    status = 415
    code = "unsupported_media_type"


class HeadTooLarge(RequestError):
    """431: request line and headers have more bytes, or more headers, than are read."""

    status = 431
    code = "head_too_large"


class TooLarge(RequestError):
    """413: the body or an image is over a byte limit."""

    status = 413
    code = "too_large"


class Overloaded(RequestError):
    """429: admission refused; try again after `retry_after` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InternalError(RequestError):
    """500: our bug. The log has the details, the answer leaves them out."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str = "internal error") -> None:
        super().__init__(message)


class ReplicaLost(RequestError):
    """502: the worker behind a router died under the request, or speaks no HTTP."""

    status = 502
    type = "server_error"
    code = "worker_lost"


class EngineUnavailable(RequestError):
    """503: the engine is starting, stopping or dead."""

    status = 503
    type = "server_error"
    code = "engine_unavailable"


class StorageBusy(RequestError):
    """503: the folder with uploaded files is unreadable, or another process holds its lock."""

    status = 503
    type = "server_error"
    code = "storage_busy"


class StorageFull(RequestError):
    """507: an upload is refused, as the disk is full or unwritable."""

    status = 507
    type = "server_error"
    code = "insufficient_storage"


class StartupError(SaccadeError):
    """The server cannot start."""


class ConfigError(StartupError):
    """A setting is wrong. The message names the option, the value and the allowed values."""


class CheckpointError(StartupError):
    """A model file is missing, damaged or unfit.

    The message names the file and, if known, the tensor.
    """
