"""Describes the Batch API in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Components, Description, reference
from saccade.core.field_docs import field_docs
from saccade.plugins.batches.fields import TOLD, BatchJob, BatchPage, BatchRequest


def _complete(components: Components) -> None:
    components["Batch"] = batch = components.pop("BatchJob")
    fields = batch["properties"]
    del fields["moments"]
    words = field_docs(BatchJob)
    for name in words.keys() & fields.keys():
        fields[name] = {**fields[name], "description": words[name]}
    moment = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    fields |= {f"{status}_at": dict(moment) for status in TOLD}
    components["BatchPage"]["properties"]["data"]["items"] = reference("Batch")


_ONE = "/v1/batches/{id}"
OPERATIONS = Description(
    (
        ApiOperation(
            "post",
            "/v1/batches",
            "Answer a file of requests while no other request waits",
            "BatchRequest",
            "Batch",
            {
                "input_file_id": "file-...",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        ),
        ApiOperation("get", "/v1/batches", "The batches, newest first", answer="BatchPage"),
        ApiOperation("get", _ONE, "Status of a batch", answer="Batch"),
        ApiOperation("post", f"{_ONE}/cancel", "Cancel a batch", answer="Batch"),
    ),
    types=(BatchRequest, BatchJob, BatchPage),
    complete=_complete,
    words={
        "expires_at": "When it ends, in seconds since 1970.",
        "cancelling_at": "When cancellation was requested, in seconds since 1970.",
        **{
            f"{name}_at": f"When it was {name.replace('_', ' ')}, in seconds since 1970."
            for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")
        },
    },
)
