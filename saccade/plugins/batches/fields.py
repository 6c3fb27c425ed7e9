"""The bodies of /v1/batches, as in OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct, field

from saccade.api.body_schema import BodySchema
from saccade.api.stored_objects import Metadata

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
MAX_CUSTOM_ID = 512
DAY = 86_400


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """When to remove files with results: seconds after they are made."""

    seconds: Annotated[int, Meta(ge=3600, le=30 * DAY)]
    """The time in seconds."""
    anchor: Literal["created_at"] = "created_at"
    """When the seconds start. They start when the file is created."""


class BatchRequest(Struct):
    """What a batch answers, and until when."""

    input_file_id: str
    """An uploaded file with purpose batch and one request per line."""
    endpoint: Endpoint
    """The path that receives every line."""
    completion_window: Literal["24h"] = "24h"
    """24h. Lines still open by then stay unanswered."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    """How long result files stay. Default: until you delete them."""


@dataclass(frozen=True, slots=True)
class BatchBody:
    """Body for POST /v1/batches."""

    batch: BatchRequest


BATCH: BodySchema[BatchBody] = BodySchema(BatchBody)


class BatchLine(Struct):
    """A line in the input file. `body`: a request's body for the endpoint."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class BatchError(Struct):
    """Why a whole batch failed."""

    code: str
    message: str
    """What is wrong."""
    line: int | None = None
    """The line in the input file, from 1."""
    param: str | None = None


class BatchErrors(Struct):
    """Errors in a list."""

    data: list[BatchError]
    """The input file's errors."""
    object: str = "list"


class RequestCounts(Struct):
    """Lines: all, those with an answer, those with an error."""

    total: int = 0
    """All lines."""
    completed: int = 0
    """Lines that have an answer."""
    failed: int = 0
    """Lines that have an error."""


class BatchJob(Struct, kw_only=True):
    """A batch, as kept. moments: by status, its beginning, in seconds since the epoch."""

    # what was asked for
    id: str
    endpoint: Endpoint
    """The path that receives every line."""
    input_file_id: str
    """An uploaded file with purpose batch and one request per line."""
    created_at: int
    expires_at: int
    model: str | None = None
    """The server's model when the batch was created. Only servers of this model run it."""
    completion_window: str = "24h"
    """24h. Lines still open by then stay unanswered."""
    # the status
    object: str = "batch"
    status: Status = "validating"
    """validating, in_progress, finalizing, completed, failed, expired, cancelling or cancelled."""
    errors: BatchErrors | None = None
    """Why the batch failed as a whole."""
    # what came of it
    output_file_id: str | None = None
    """The file with answers, in the input's order."""
    error_file_id: str | None = None
    """The file with errors, in the input's order."""
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    """Line counts by outcome."""
    # the client's own words, and times
    metadata: Metadata | None = None
    moments: dict[Status, int] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the batch as clients see it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        begun = found.pop("moments")
        return found | {f"{status}_at": begun.get(status) for status in TOLD}


class BatchPage(Struct):
    """A page in the list, newest first."""

    data: list[dict[str, Any]]
    """The batches."""
    first_id: str | None
    """The id of the first entry."""
    last_id: str | None
    """The id of the last entry, for `after`."""
    has_more: bool
    """More entries follow the last one."""
    object: str = "list"
