"""Describes the operator's endpoints in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Description
from saccade.plugins.operator.handlers import (
    LoadAdapter,
    MemoryTags,
    UnloadAdapter,
    UpdateFromDisk,
    UpdateWeights,
)

_CHECKPOINT = {"model_path": "/checkpoints/step-1000"}
_TAGS = {"tags": ["weights", "kv_cache"]}
OPERATIONS = Description(
    (
        ApiOperation(
            "post",
            "/pause",
            "Pause. New requests wait; ?mode=abort, wait or keep is for those in flight",
        ),
        ApiOperation("post", "/pause_generation", "Pause, by SGLang's name"),
        ApiOperation("post", "/resume", "Resume after a pause"),
        ApiOperation("post", "/continue_generation", "Resume, by SGLang's name"),
        ApiOperation("get", "/is_paused", "Report whether the server is paused"),
        ApiOperation(
            "post",
            "/sleep",
            "Release memory, as in vLLM: ?level=1 (KV, embeddings; on a GPU also weights) or 2 "
            "(all). New requests wait; ?mode=abort or wait is for those in flight",
        ),
        ApiOperation(
            "post",
            "/wake_up",
            "Allocate memory again and resume; ?tags=weights or kv_cache: only this part",
        ),
        ApiOperation("get", "/is_sleeping", "Report whether the server is asleep"),
        ApiOperation(
            "post",
            "/update_weights",
            "Load another checkpoint of the same shape, while paused",
            "UpdateWeights",
            example=_CHECKPOINT,
        ),
        ApiOperation(
            "post",
            "/update_weights_from_disk",
            "Pause, load another checkpoint and resume, as in SGLang",
            "UpdateFromDisk",
            example=_CHECKPOINT,
        ),
        ApiOperation(
            "post",
            "/release_memory_occupation",
            "Release memory once all requests have finished, as in SGLang: weights and kv_cache, "
            "or only those in `tags`",
            "MemoryTags",
            example=_TAGS,
        ),
        ApiOperation(
            "post",
            "/resume_memory_occupation",
            "Allocate memory again and resume, as in SGLang",
            "MemoryTags",
            example=_TAGS,
        ),
        ApiOperation(
            "post",
            "/v1/load_lora_adapter",
            "Load an adapter, as in vLLM. GET /v1/models lists it",
            "LoadAdapter",
            example={"lora_name": "receipts", "lora_path": "/adapters/receipts"},
        ),
        ApiOperation(
            "post",
            "/v1/unload_lora_adapter",
            "Unload an adapter. Requests in flight still use it",
            "UnloadAdapter",
            example={"lora_name": "receipts"},
        ),
    ),
    types=(LoadAdapter, MemoryTags, UnloadAdapter, UpdateFromDisk, UpdateWeights),
    words={
        "lora_name": "The adapter's name. Requests choose it in the field model.",
        "model_path": "The directory of the checkpoint on the server.",
    },
)
