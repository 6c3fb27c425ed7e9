"""The operator's endpoints in `/openapi.json`."""

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
            "Pause: new requests wait; ?mode= abort, wait for or keep those in flight",
        ),
        ApiOperation("post", "/pause_generation", "Pause, by SGLang's name"),
        ApiOperation("post", "/resume", "Resume after a pause"),
        ApiOperation("post", "/continue_generation", "Resume, by SGLang's name"),
        ApiOperation("get", "/is_paused", "Report whether the server is paused"),
        ApiOperation(
            "post",
            "/sleep",
            "Give memory back, as vLLM has it: ?level= 1 (KV, embeddings; on a GPU weights, too) "
            "or 2 (all); ?mode= abort or wait for those in flight; new requests wait",
        ),
        ApiOperation(
            "post",
            "/wake_up",
            "Take memory again, and go on; ?tags= weights, kv_cache: only these",
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
            "Pause, take another checkpoint and resume, as SGLang has it",
            "UpdateFromDisk",
            example=_CHECKPOINT,
        ),
        ApiOperation(
            "post",
            "/release_memory_occupation",
            "Give memory back once all is answered, as SGLang has it: weights and kv_cache, or "
            "those of `tags`",
            "MemoryTags",
            example=_TAGS,
        ),
        ApiOperation(
            "post",
            "/resume_memory_occupation",
            "Take memory again and go on, as SGLang has it",
            "MemoryTags",
            example=_TAGS,
        ),
        ApiOperation(
            "post",
            "/v1/load_lora_adapter",
            "Load an adapter, as vLLM has it; models list it",
            "LoadAdapter",
            example={"lora_name": "receipts", "lora_path": "/adapters/receipts"},
        ),
        ApiOperation(
            "post",
            "/v1/unload_lora_adapter",
            "Unload an adapter; requests in flight finish with it",
            "UnloadAdapter",
            example={"lora_name": "receipts"},
        ),
    ),
    types=(LoadAdapter, MemoryTags, UnloadAdapter, UpdateFromDisk, UpdateWeights),
    words={
        "lora_name": "The adapter's name. Requests choose it in the field model.",
        "model_path": "The server's folder with the checkpoint.",
    },
)
