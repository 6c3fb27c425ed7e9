"""The bodies of /v1/batches, as in OpenAI's API. Knows nothing of running a batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct, field

from saccade.api.responses.fields import Metadata

Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
TOLD = tuple(status for status in get_args(Status) if status != "validating")
"""Whose beginnings clients are told."""
OVER = frozenset(("failed", "completed", "expired", "cancelled"))
LONGEST_CUSTOM_ID = 512
DAY = 86_400


class ExpiresAfter(Struct):
    """When to remove files with results: seconds after they are made."""

    seconds: Annotated[int, Meta(ge=3600, le=30 * DAY)]
    anchor: Literal["created_at"] = "created_at"


class BatchRequest(Struct):
    """Body for POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchLine(Struct):
    """A line in the input file. `body`: a request's body for the endpoint."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=LONGEST_CUSTOM_ID)]
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class BatchError(Struct):
    """Why a whole batch failed. `line`: in the input file, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    """Errors in a list."""

    data: list[BatchError]
    object: str = "list"


class RequestCounts(Struct):
    """Lines: all, those with an answer, those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchJob(Struct, kw_only=True):
    """A batch, as kept. moments: by status, its beginning, in seconds since the epoch."""

    # what was asked for
    id: str
    endpoint: Endpoint
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    # how it stands
    object: str = "batch"
    status: Status = "validating"
    errors: BatchErrors | None = None
    # what came of it
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    # the client's own words, and times
    metadata: Metadata | None = None
    moments: dict[Status, int] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """Return the batch as clients see it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        begun = found.pop("moments")
        return found | {f"{status}_at": begun.get(status) for status in TOLD}


class BatchPage(Struct):
    """A page in the list, newest first."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"
