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
"""The statuses for which clients get the time when they started."""
OVER = frozenset(("failed", "completed", "expired", "cancelled"))
MAX_CUSTOM_ID = 512
DAY = 86_400


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """When to remove result files, in seconds after they are created."""

    seconds: Annotated[int, Meta(ge=3600, le=30 * DAY)]
    """The time in seconds."""
    anchor: Literal["created_at"] = "created_at"
    """When the time starts: when the file is created."""


class BatchRequest(Struct):
    """The requests of a batch, and its time limit."""

    input_file_id: str
    """An uploaded file with purpose batch and one request per line."""
    endpoint: Endpoint
    """The endpoint for all lines."""
    completion_window: Literal["24h"] = "24h"
    """24h. Lines without a result by then are not run."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    """How long result files are stored. By default, until you delete them."""


@dataclass(frozen=True, slots=True)
class BatchBody:
    """Body for POST /v1/batches."""

    batch: BatchRequest


BATCH: BodySchema[BatchBody] = BodySchema(BatchBody)


class BatchLine(Struct):
    """A line of the input file.

    body: the body of a request to the endpoint.
    """

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class BatchError(Struct):
    """The reason why a batch failed as a whole."""

    code: str
    message: str
    """The error message."""
    line: int | None = None
    """The line in the input file, counted from 1."""
    param: str | None = None


class BatchErrors(Struct):
    """A list of errors."""

    data: list[BatchError]
    """The errors in the input file."""
    object: str = "list"


class RequestCounts(Struct):
    """Counts of lines: all, those with an answer, and those with an error."""

    total: int = 0
    """The number of all lines."""
    completed: int = 0
    """The number of lines with an answer."""
    failed: int = 0
    """The number of lines with an error."""


class BatchJob(Struct, kw_only=True):
    """A batch as it is stored.

    moments: the time at which each status started, in seconds since the epoch.
    """

    # the request
    id: str
    endpoint: Endpoint
    """The endpoint for all lines."""
    input_file_id: str
    """An uploaded file with purpose batch and one request per line."""
    created_at: int
    expires_at: int
    model: str | None = None
    """The server's model when the batch was created. Only servers of this model run the batch."""
    completion_window: str = "24h"
    """24h. Lines without a result by then are not run."""
    # the status
    object: str = "batch"
    status: Status = "validating"
    """validating, in_progress, finalizing, completed, failed, expired, cancelling or cancelled."""
    errors: BatchErrors | None = None
    """The reason why the batch failed as a whole."""
    # the results
    output_file_id: str | None = None
    """The file with answers, in the order of the input."""
    error_file_id: str | None = None
    """The file with errors, in the order of the input."""
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    """The number of lines by outcome."""
    # the client's metadata, and times
    metadata: Metadata | None = None
    moments: dict[Status, int] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the batch in the format that clients get."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        begun = found.pop("moments")
        return found | {f"{status}_at": begun.get(status) for status in TOLD}


class BatchPage(Struct):
    """A page of the list, the newest first."""

    data: list[dict[str, Any]]
    """The batches."""
    first_id: str | None
    """The id of the first entry."""
    last_id: str | None
    """The id of the last entry, for `after`."""
    has_more: bool
    """Whether there are more entries after the last one."""
    object: str = "list"
