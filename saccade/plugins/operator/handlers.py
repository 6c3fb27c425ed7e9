"""The operator's endpoints for a running server: adapters, as in vLLM, and pause, sleep and new
weights, as in vLLM and SGLang.

This module checks permissions. `front/adapters.py` and `front/changes.py` make the changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from saccade.api.handlers import RequestHandler, json_response
from saccade.api.mounting import ApiContext
from saccade.core.errors import InvalidRequest, Unauthorized
from saccade.core.plan import MEMORY, Memory
from saccade.edge.body import Bodies, read_json
from saccade.edge.headers import check_operator, is_loopback
from saccade.front.changes import PauseMode
from saccade.front.fields import Reader

LARGEST = 1 << 16
"""Maximum bytes of a body."""


class LoadAdapter(Struct, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """A directory on the server with adapter_config.json and adapter_model.safetensors."""


class UnloadAdapter(Struct, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """Accepted for vLLM's clients and ignored."""


T = TypeVar("T")


class UpdateWeights(Struct, forbid_unknown_fields=True):
    """POST /update_weights. model_path: a checkpoint's directory, or one safetensors file, which
    may be shared memory (/dev/shm/NAME), with the tensor names of the checkpoint.
    """

    model_path: str


class UpdateFromDisk(Struct, forbid_unknown_fields=True):
    """Body for POST /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    """auto or safetensors. Other formats are not supported."""
    abort_all_requests: bool | None = None
    """If true, running requests fail. By default, they finish first."""
    keep_pause: bool | None = None
    """After the change, new requests wait until a client resumes the server."""
    flush_cache: Literal[True] | None = None
    """Must be true, because the caches depend on the old weights."""
    is_async: Any = None
    """Accepted and ignored."""
    recapture_cuda_graph: Any = None
    """Accepted and ignored."""
    token_step: Any = None
    """Accepted and ignored."""
    torch_empty_cache: Any = None
    """Accepted and ignored."""
    weight_version: Any = None
    """Accepted and ignored."""


class MemoryTags(Struct, forbid_unknown_fields=True):
    """POST /release_memory_occupation, /resume_memory_occupation. None: all."""

    tags: list[str] | None = None
    """The memory: weights, kv_cache. By default, both."""


LOAD_FORMATS = (None, "auto", "safetensors")
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
_UPDATE: Reader[UpdateWeights] = Reader(UpdateWeights)
_FROM_DISK: Reader[UpdateFromDisk] = Reader(UpdateFromDisk)
_TAGS: Reader[MemoryTags] = Reader(MemoryTags)
_LOAD: Reader[LoadAdapter] = Reader(LoadAdapter)
_UNLOAD: Reader[UnloadAdapter] = Reader(UnloadAdapter)


def operator_routes(api: ApiContext) -> list[Route]:
    options = api.options
    closed = options.asks_for_key or is_loopback(options.server.host)
    adapters = _Operations(api.handler, api.handler.admission.bodies, closed)
    return [
        *(
            Route(path, adapters.pause, methods=["POST"])
            for path in ("/pause", "/pause_generation")
        ),
        *(
            Route(path, adapters.resume, methods=["POST"])
            for path in ("/resume", "/continue_generation")
        ),
        Route("/is_paused", adapters.is_paused),
        Route("/update_weights", adapters.update, methods=["POST"]),
        Route("/update_weights_from_disk", adapters.update_from_disk, methods=["POST"]),
        Route("/sleep", adapters.sleep, methods=["POST"]),
        Route("/wake_up", adapters.wake, methods=["POST"]),
        Route("/is_sleeping", adapters.is_sleeping),
        Route("/release_memory_occupation", adapters.release, methods=["POST"]),
        Route("/resume_memory_occupation", adapters.occupy, methods=["POST"]),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Operations:
    """The request handlers.

    closed: whether access is limited to clients with the key and local ones.
    """

    handler: RequestHandler
    bodies: Bodies
    closed: bool

    async def load(self, request: Request) -> Response:
        asked = await self._read(request, _LOAD)
        adapter = await self.handler.load_adapter(asked.lora_name, asked.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        asked = await self._read(request, _UNLOAD)
        self.handler.front.adapters.unload(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def pause(self, request: Request) -> Response:
        """Pause the engine. The query parameter `mode` is abort by default."""
        self._check(request)
        mode = _read_mode(request, PAUSE_MODES)
        await self.handler.front.adapters.changes.pause(mode)
        return json_response({"status": "paused"})

    async def sleep(self, request: Request) -> Response:
        """Put the engine to sleep. The query parameters are `level`, by default 1, and `mode`, as
        in `pause`, except keep.
        """
        self._check(request)
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise InvalidRequest(
                f"level: expected 1 or 2, got {level[:100]!r}; POST /pause releases no memory",
                "level",
            )
        mode = _read_mode(request, ("abort", "wait"))
        changes = self.handler.front.adapters.changes
        await changes.sleep(MEMORY, mode, lightly=level == "1")
        return json_response({"status": "asleep", "released": changes.asleep})

    async def wake(self, request: Request) -> Response:
        """Wake the engine. The query parameter `tags` lists the memory to allocate, by
        default all.
        """
        self._check(request)
        return await self._wake(request.query_params.getlist("tags"))

    async def is_sleeping(self, _: Request) -> Response:
        return json_response({"is_sleeping": bool(self.handler.front.adapters.changes.asleep)})

    async def release(self, request: Request) -> Response:
        asked = await self._read(request, _TAGS)
        changes = self.handler.front.adapters.changes
        await changes.sleep(_memory(asked.tags), "wait")
        return json_response({"status": "asleep", "released": changes.asleep})

    async def occupy(self, request: Request) -> Response:
        asked = await self._read(request, _TAGS)
        return await self._wake(asked.tags)

    async def _wake(self, tags: Sequence[str] | None) -> Response:
        front = self.handler.front
        kept = await front.adapters.changes.wake(_memory(tags))
        front.pooled_outputs.clear()
        asleep = front.adapters.changes.asleep
        status = "asleep" if asleep else "awake"
        return json_response({"status": status, "released": asleep, "embeddings_kept": kept})

    async def resume(self, request: Request) -> Response:
        self._check(request)
        await self.handler.front.adapters.changes.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        return json_response({"is_paused": self.handler.front.adapters.changes.paused})

    async def update(self, request: Request) -> Response:
        return await self._update((await self._read(request, _UPDATE)).model_path)

    async def update_from_disk(self, request: Request) -> Response:
        """Load new weights. Pauses the server, unless it is paused already, as SGLang's clients
        expect.
        """
        asked = await self._read(request, _FROM_DISK)
        if asked.load_format not in LOAD_FORMATS:
            raise InvalidRequest(
                f"load_format: expected auto or safetensors, got {str(asked.load_format)[:100]!r}",
                "load_format",
            )
        changes = self.handler.front.adapters.changes
        if changes.paused:
            return await self._update(asked.model_path)
        _check_path(asked.model_path)
        await changes.pause("abort" if asked.abort_all_requests else "wait")
        try:
            return await self._update(asked.model_path)
        finally:
            if not asked.keep_pause:
                await changes.resume()

    async def _update(self, path: str) -> Response:
        _check_path(path)
        front = self.handler.front
        kept = await front.adapters.changes.update_weights(path)
        front.pooled_outputs.clear()
        outcome = "the image embeddings are kept" if kept else "the vision encoder differs"
        message = f"the weights are those of {path}; {outcome}"
        return json_response({"success": True, "message": message, "embeddings_kept": kept})

    async def _read(self, request: Request, reader: Reader[T]) -> T:
        self._check(request)
        with self.bodies.hold(request, LARGEST) as held:
            body = await read_json(request, held, LARGEST)
            return reader.json(msgspec.Raw(bytes(body)), "")

    def _check(self, request: Request) -> None:
        self.handler.front.check_ready()
        check_operator(request.scope)
        if not self.closed:
            raise Unauthorized(
                "this server has no API key and can be reached from other hosts: start it with "
                "--api-key to use this endpoint"
            )


Mode = TypeVar("Mode", bound=PauseMode)


def _read_mode(request: Request, modes: Sequence[Mode]) -> Mode:
    """Return the query parameter `mode`: what happens to requests in flight. Raises
    InvalidRequest.
    """
    asked = request.query_params.get("mode", "abort")
    mode = next((each for each in modes if each == asked), None)
    if mode is None:
        raise InvalidRequest(f"mode: expected {', '.join(modes)}, got {asked[:100]!r}", "mode")
    return mode


def _memory(tags: Sequence[str] | None) -> Sequence[Memory]:
    """Return the types of memory with these names, or by default all. Raises InvalidRequest."""
    if unknown := [tag for tag in tags or () if tag not in MEMORY]:
        raise InvalidRequest(
            f"tags: expected {', '.join(MEMORY)}, got {unknown[0][:100]!r}", "tags"
        )
    return [each for each in MEMORY if not tags or each in tags]


def _check_path(path: str) -> None:
    if not Path(path).is_absolute() or "\0" in path:
        raise InvalidRequest("model_path: expected an absolute path", "model_path")
