"""An example body for each route of `/openapi.json`. A test sends each of them to a server."""

from __future__ import annotations

from typing import Any

_PIXELS = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAX0lEQVR4nO3PQQ0AIBDAMMC/50MEj4ZkVbDtWX87Ou"
    "BVA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA9oFUoUB"
    "f3Xr7AgAAAAASUVORK5CYII="
)
IMAGE = f"data:image/png;base64,{_PIXELS}"
"""A red square of 64 x 64 pixels."""

_CHAT = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": IMAGE}},
            {"type": "text", "text": "Which colour is the square?"},
        ],
    }
]
_ITEMS = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": IMAGE},
            {"type": "input_text", "text": "Which colour is the square?"},
        ],
    }
]
_BLOCKS = [
    {
        "role": "user",
        "content": [
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": _PIXELS},
            },
            {"type": "text", "text": "Which colour is the square?"},
        ],
    }
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/load_lora_adapter": {"lora_name": "receipts", "lora_path": "/adapters/receipts"},
    "/v1/unload_lora_adapter": {"lora_name": "receipts"},
    "/update_weights": {"model_path": "/checkpoints/step-1000"},
    "/update_weights_from_disk": {"model_path": "/checkpoints/step-1000"},
    "/release_memory_occupation": {"tags": ["weights", "kv_cache"]},
    "/resume_memory_occupation": {"tags": ["weights", "kv_cache"]},
    "/v1/batches": {
        "input_file_id": "file-...",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    "/v1/chat/completions": {"messages": _CHAT, "max_tokens": 32},
    "/v1/completions": {"prompt": "The square is", "max_tokens": 16},
    "/v1/responses": {"input": _ITEMS, "max_output_tokens": 32},
    "/v1/responses/input_tokens": {"input": _ITEMS},
    "/v1/messages": {"model": "", "messages": _BLOCKS, "max_tokens": 32},
    "/v1/messages/count_tokens": {"model": "", "messages": _BLOCKS},
    "/v1/embeddings": {"messages": _CHAT},
    "/v2/embed": {"texts": ["A red square", "A blue star"], "input_type": "search_document"},
    "/v1/rerank": {"query": "Which is red?", "documents": ["A blue star", _CHAT[0]]},
    "/v1/score": {"text_1": "Which is red?", "text_2": ["A blue star", "A red square"]},
    "/v1/decisions": {
        "input": _ITEMS,
        "questions": [
            {"type": "predicate", "instructions": "The square is red."},
            {
                "type": "choice",
                "instructions": "Which colour is it?",
                "choices": [{"value": "red"}, {"value": "blue"}],
            },
        ],
    },
    "/tokenize": {"messages": _CHAT},
    "/detokenize": {"tokens": [72, 105]},
}
