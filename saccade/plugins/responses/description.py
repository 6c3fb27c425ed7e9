"""Describes the Responses API in `/openapi.json`, with an example input."""

from __future__ import annotations

from typing import Any

from saccade.api.description import ApiOperation, Components, Description, list_of, one_of
from saccade.api.field_words import ADDRESS, TEMPLATE_HINT
from saccade.api.operations import IMAGE, QUESTION
from saccade.plugins.responses import fields, items

EXAMPLE_INPUT: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": IMAGE},
            {"type": "input_text", "text": QUESTION},
        ],
    }
]
_EXAMPLE = {"input": EXAMPLE_INPUT, "max_output_tokens": 32}
_ITEMS = (
    items.MessageItem,
    items.CallItem,
    items.ResultItem,
    items.ComputerCallItem,
    items.ComputerResultItem,
    items.ReasoningItem,
    items.ReferenceItem,
)


def _complete(components: Components) -> None:
    item = one_of(*_ITEMS)
    list_of(components["ResponseInput"]["properties"]["input"])["items"] = item
    components["InputTokens"] = {
        "type": "object",
        "properties": {"object": {"type": "string"}, "input_tokens": {"type": "integer"}},
    }
    texts = ("id", "object", "status", "model")
    components["Response"] = {
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in texts},
            "created_at": {"type": "integer"},
            "output": {"type": "array", "items": item},
            "usage": {"type": "object"},
        },
        "required": [*texts, "created_at", "output"],
    }


_ONE = "/v1/responses/{id}"
OPERATIONS = Description(
    (
        ApiOperation(
            "post",
            "/v1/responses",
            "Answer a chat and optionally store it, as in OpenAI's Responses API",
            "ResponsesRequest",
            "Response",
            _EXAMPLE,
            streams=True,
        ),
        ApiOperation(
            "post",
            "/v1/responses/input_tokens",
            "Count the tokens of a response's input",
            "ResponsesRequest",
            "InputTokens",
            {"input": EXAMPLE_INPUT},
        ),
        ApiOperation(
            "get", _ONE, "Return a response that is stored or in progress", answer="Response"
        ),
        ApiOperation("delete", _ONE, "Delete a response"),
        ApiOperation("get", f"{_ONE}/input_items", "List the input items of a response"),
        ApiOperation(
            "post", f"{_ONE}/cancel", "Stop a response that is being streamed", answer="Response"
        ),
    ),
    bodies={"ResponsesRequest": (fields.RESPONSES,)},
    types=_ITEMS,
    sampling=(fields.ResponseEnding,),
    complete=_complete,
    words={
        "file_url": ADDRESS,
        "call_id": "Links a function's output to its call.",
        "truncation": "auto: drop the oldest messages until the prompt fits the context. "
        "disabled: reject a prompt that is too long.",
        "output": "The model's answer as items: reasoning, text and calls.",
        "status": "The current state.",
    },
    own_words={
        ("ResponseForm", "reasoning"): f"How much the model reasons. {TEMPLATE_HINT}",
        ("Response", "status"): "in_progress, completed, incomplete, cancelled or failed.",
    },
)
