"""The descriptions in `/openapi.json` of the core's operations: chat completions, completions,
tokens, models and the server itself.

Also has an image and a chat for the examples of other APIs.
"""

from __future__ import annotations

from typing import Any

from saccade.api.chat import fields, write
from saccade.api.description import ApiOperation, Components, Description, Schema, reference
from saccade.edge.refusal import ErrorResponse
from saccade.front.content import ChatMessage

PIXELS = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAX0lEQVR4nO3PQQ0AIBDAMMC/50MEj4ZkVbDtWX87Ou"
    "BVA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA9oFUoUB"
    "f3Xr7AgAAAAASUVORK5CYII="
)
IMAGE = f"data:image/png;base64,{PIXELS}"
"""A data: URL of a red square of 64 x 64 pixels."""
QUESTION = "Which colour is the square?"
EXAMPLE_CHAT: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": IMAGE}},
            {"type": "text", "text": QUESTION},
        ],
    }
]


def _complete(components: Components) -> None:
    components["ChatCompletion"] = _completion("ChatChoice")
    entries = components["TextChoice"]["properties"]["prompt_logprobs"]
    components["ChatCompletion"]["properties"]["prompt_logprobs"] = entries
    components["TextCompletion"] = _completion("TextChoice")


def _completion(choice: str) -> Schema:
    return {
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in ("id", "object", "model")},
            "created": {"type": "integer"},
            "choices": {"type": "array", "items": reference(choice)},
            "usage": reference("Usage"),
            "diagnostics": reference("CacheDiagnostics"),
        },
        "required": ["id", "object", "created", "model", "choices"],
    }


OPERATIONS = Description(
    (
        ApiOperation(
            "post",
            "/v1/chat/completions",
            "Answer a chat with images, as in OpenAI's API",
            "ChatCompletionRequest",
            "ChatCompletion",
            {"messages": EXAMPLE_CHAT, "max_tokens": 32},
            streams=True,
        ),
        ApiOperation(
            "post",
            "/v1/completions",
            "Complete a text or tokens",
            "CompletionRequest",
            "TextCompletion",
            {"prompt": "The square is", "max_tokens": 16},
            streams=True,
        ),
        ApiOperation(
            "post",
            "/tokenize",
            "Count the tokens of a text or a chat, and of each image",
            "TokenizeRequest",
            "TokenCount",
            {"messages": EXAMPLE_CHAT},
        ),
        ApiOperation(
            "post",
            "/detokenize",
            "Decode tokens to text",
            "DetokenizeRequest",
            "TokenText",
            {"tokens": [72, 105]},
        ),
        ApiOperation("get", "/v1/models", "List the model and its adapters", answer="ModelList"),
        ApiOperation("get", "/v1/models/{name}", "One model", answer="Model"),
        ApiOperation("get", "/health", "Report whether the server is ready"),
        ApiOperation("get", "/metrics", "Metrics in Prometheus' format"),
        ApiOperation("get", "/version", "Saccade's version"),
        ApiOperation(
            "post",
            "/flush_cache",
            "Flush the KV prefix cache, embeddings and cached pixels that are not in use",
        ),
        ApiOperation(
            "post", "/reset_prefix_cache", "Flush the KV prefix cache, except for pages in use"
        ),
    ),
    bodies={
        "ChatCompletionRequest": (fields.CHAT,),
        "CompletionRequest": (fields.COMPLETION,),
        "TokenizeRequest": (fields.TOKENIZE_CHAT, fields.TOKENIZE_TEXT),
        "DetokenizeRequest": (fields.DETOKENIZE,),
    },
    types=(
        write.ChatChoice,
        write.TextChoice,
        write.Usage,
        write.CacheDiagnostics,
        write.TokenCount,
        write.TokenText,
        write.ModelList,
        ErrorResponse,
        ChatMessage,
    ),
    items={("Conversation", "messages"): (ChatMessage,)},
    sampling=(fields.Sampling, fields.Ending, fields.TextPrompt),
    complete=_complete,
    own_words={
        ("ChatCompletion", "prompt_logprobs"): "Each prompt token and the likeliest tokens at its "
        "place, by token id. The first is null.",
    },
)
