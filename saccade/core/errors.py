"""The exception tree. Code that meets bad input raises one of these, and the API converts it to the
error format of the client's dialect.

SaccadeError
├── RequestError          the caller's request cannot be served; has an HTTP status
│   ├── InvalidRequest    400  malformed or unsupported
│   │   ├── ImageError    400  an image that cannot be fetched or decoded, or is over a limit
│   │   │   └── OversizedImages    400  images that must not be downsized, but are too large
│   │   └── UnknownDigests 400 a body references bytes that were not sent or no longer stored
│   ├── Unauthorized      401
│   ├── Forbidden         403  a web page that may not use the server
│   ├── NotFound          404
│   ├── TooSlow           408  the request did not arrive in time
│   ├── Cancelled         409  cancelled by the client
│   ├── OtherTower        409  the requested embedding is of another vision encoder or settings
│   ├── TooLarge          413  over a byte limit
│   ├── UnsupportedMedia  415  a body in an unsupported encoding
│   ├── HeadTooLarge      431  request line and headers over a limit
│   ├── Overloaded        429  the queue is full; retry after `retry_after` seconds
│   ├── InternalError     500  a bug; see the log
│   ├── ReplicaLost       502  a router's worker crashed during the request
│   ├── EngineUnavailable 503  the engine is starting, stopping or has exited
│   ├── StorageBusy       503  the directory of uploaded files does not respond
│   └── StorageFull       507  the disk is full, so an upload cannot be stored
└── StartupError               the server cannot start; the message explains how to fix it
    ├── ConfigError            a setting
    └── CheckpointError        a model file; the message has the file and tensor
"""

from __future__ import annotations

from typing import Any


class SaccadeError(Exception):
    """Base class of all exceptions that Saccade raises intentionally."""


class RequestError(SaccadeError):
    """The request cannot be served.

    `param` is the path of the field as the client wrote it, e.g. "messages[2].content[0]".
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
        """Additional fields of the error in Anthropic's format."""
        return {}


class InvalidRequest(RequestError):
    """400: the request is malformed or unsupported."""

    code = "invalid_value"


class ImageError(InvalidRequest):
    """400: an image cannot be fetched or decoded, or is over a limit. `param` is its field."""

    code = "invalid_image"


class UnknownDigests(InvalidRequest):
    """400: the body references digests that its sender never uploaded, or that have expired.

    `digests` lists all of them.
    """

    code = "unknown_digests"

    def __init__(self, message: str, digests: tuple[str, ...]) -> None:
        super().__init__(message)
        self.digests = digests

    @property
    def details(self) -> dict[str, Any]:
        return {"digests": self.digests}


class OversizedImages(ImageError):
    """400: images are too large for the model, and the client does not allow downsizing.

    side: the longest side that the model accepts, in pixels.
    places: the fields of these images in the request.
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
    """403: a web page's origin is not allowed, or the Host header is not one of this server's."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(RequestError):
    """404: the model, file or path is missing."""

    status = 404
    code = "not_found"


class TooSlow(RequestError):
    """408: the request's headers or body did not arrive in time."""

    status = 408
    code = "timeout"


class Cancelled(RequestError):
    """409: the client cancelled the request."""

    status = 409
    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class OtherTower(RequestError):
    """409: a server requested an embedding from a vision encoder other than this server's, or with
    other settings.
    """

    status = 409
    code = "wrong_tower"


class UnsupportedMedia(RequestError):
    """415: the encoding of the body is unsupported."""

    status = 415
    code = "unsupported_media_type"


class HeadTooLarge(RequestError):
    """431: the request line and headers are too long, or there are too many headers."""

    status = 431
    code = "head_too_large"


class TooLarge(RequestError):
    """413: the body or an image is over a byte limit."""

    status = 413
    code = "too_large"


class Overloaded(RequestError):
    """429: the server is overloaded; retry after `retry_after` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InternalError(RequestError):
    """500: a bug. The details are logged, and are not sent to the client."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str = "internal error") -> None:
        super().__init__(message)


class ReplicaLost(RequestError):
    """502: a router's worker crashed during the request, or did not send HTTP."""

    status = 502
    type = "server_error"
    code = "worker_lost"


class EngineUnavailable(RequestError):
    """503: the engine is starting, stopping or has exited."""

    status = 503
    type = "server_error"
    code = "engine_unavailable"


class StorageBusy(RequestError):
    """503: the directory of uploaded files cannot be read, or another process has locked it."""

    status = 503
    type = "server_error"
    code = "storage_busy"


class StorageFull(RequestError):
    """507: an upload was rejected because the disk is full or cannot be written."""

    status = 507
    type = "server_error"
    code = "insufficient_storage"


class StartupError(SaccadeError):
    """The server cannot start."""


class ConfigError(StartupError):
    """A setting is wrong. The message names the option, the value and the allowed values."""


class CheckpointError(StartupError):
    """A model file is missing, damaged or unsupported.

    The message has the file and, if known, the tensor.
    """
