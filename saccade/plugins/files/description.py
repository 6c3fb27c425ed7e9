"""Describes the Files API in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Components, Description


def _complete(components: Components) -> None:
    file, text = {"type": "string", "format": "binary"}, {"type": "string"}
    components["FileUpload"] = {
        "type": "object",
        "properties": {"file": file, "purpose": text, "warm": text},
        "required": ["file"],
    }


OPERATIONS = Description(
    (
        ApiOperation("get", "/v1/files", "The uploaded files"),
        ApiOperation(
            "post",
            "/v1/files",
            "Upload an image once, and reference it by its id in many messages",
            form="FileUpload",
        ),
        ApiOperation("get", "/v1/files/{id}", "One uploaded file"),
        ApiOperation("delete", "/v1/files/{id}", "Delete a file"),
        ApiOperation("get", "/v1/files/{id}/content", "Return the bytes of a file"),
    ),
    complete=_complete,
    words={
        "purpose": "vision for images, or another purpose from OpenAI's API.",
    },
    own_words={
        ("FileUpload", "file"): "The file's bytes.",
        ("FileUpload", "warm"): "How you will ask about the image, as JSON. Use the same "
        "`min_pixels`, `max_pixels`, `detail` and `cache_salt` as in your question. `prefix` holds "
        "the messages before the image. The server encodes and prefills it in idle time.",
    },
)
