"""The messages that the front end, the engine and the workers exchange over the socket pairs of
`ipc/child.py`.

Messages never contain pixels. Pixels are written to the shared arena, at the position that a
`PixelSlot` specifies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from saccade.core.config import (
    Dtype,
    EngineConfig,
    Hardware,
    KVDtype,
    ParallelConfig,
    QuantizationMode,
    Role,
    TowerQuantization,
)
from saccade.core.options import CacheOptions, EngineOptions, ModelOptions
from saccade.core.plan import CancelSteps, Change, Changed, Masks, PixelSlot, Plan, StepResult
from saccade.core.settings import EngineSettings
from saccade.core.types import Delta, Image, ImageKey, Request, Tower
from saccade.ipc.child import Codec

Values = tuple[tuple[str, tuple[str, ...], float], ...]
"""Current values of metrics, as (name, label values, value)."""

Same = tuple[tuple[ImageKey, Image], ...]
"""Pairs of images with equal pixels, as (key, other image). The embedding of the other image is
used for both.
"""

PEER_LOST_STATUS = 3
"""Exit status of a worker that exits because another worker did."""

# ---- front -> engine


@dataclass(frozen=True, slots=True)
class ServeModel:
    """The first message to the engine after its boot message: the model, the options and the size
    of the arena.

    The front-end process sends it once it has read the checkpoint's configuration.
    """

    folder: str
    model: ModelOptions
    engine: EngineOptions
    arena_bytes: int
    caches: CacheOptions
    role: Role = "all"
    settings: EngineSettings = EngineSettings()  # noqa: RUF009 - frozen
    # options of each plugin that has an engine part, by the plugin's name
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """The tokenizer, serialized with `tokenizers.Tokenizer.to_str`. Sent once, before the first
    request with a grammar.
    """

    tokenizer_json: str


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request. The pixels of its images are sent later, when the engine requests them."""

    request: Request
    # aliases among the request's images, as found in an earlier run
    aliases: Same = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop generating, because the client has disconnected or a stop string was found.

    The engine answers with a last delta whose finish reason is `abort`, unless the request has
    already ended.
    """

    id: str


@dataclass(frozen=True, slots=True)
class PixelsReady:
    """The image's pixels are in the slot that `Output.want` assigned to them. The front end no
    longer writes to the slot.
    """

    key: ImageKey
    # hash of the pixels, or b"" if none was computed. Images with equal hashes have bit-identical
    # embeddings.
    pixels: bytes = b""
    # hashes of the image's tiles, in the vision encoder's order, if it encodes tiles independently
    tiles: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingReady:
    """The slot that `Output.want` assigned contains the image's complete embedding instead of its
    pixels.

    Another server has computed it with an identical vision encoder. The front-end process no longer
    writes to the slot.
    """

    key: ImageKey


@dataclass(frozen=True, slots=True)
class PixelsFailed:
    """The image could not be decoded, or its decoding was cancelled. The front end no longer
    writes to its slot.

    If requests still wait for the image, all of them fail with this error.
    """

    key: ImageKey
    error: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Clear the KV prefix cache, except for pages that running requests use.

    Requests in flight continue. Later requests find an empty cache.
    """

    embeddings: bool  # also clear the embeddings in every tier, and the pixels kept in the arena


@dataclass(frozen=True, slots=True)
class Alter:
    """Change the model, for example load an adapter. The engine answers with an `Altered` with the
    same id.
    """

    id: int
    change: Change


@dataclass(frozen=True, slots=True)
class Pause:
    """Do not start new requests. The engine answers with `Altered` once no request is computed any
    more.
    """

    id: int
    # requests in flight: fail them with an error, finish them first, or freeze them until `Resume`
    mode: Literal["abort", "wait", "keep"]


@dataclass(frozen=True, slots=True)
class Resume:
    """End a pause. A no-op if the engine is not paused. The engine answers with `Altered`."""

    id: int


@dataclass(frozen=True, slots=True)
class Scrape:
    """Request the engine's metrics. It answers with `MetricValues`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish the running requests, then exit.

    Requests that are unfinished after `grace` seconds end with an error.
    """

    grace: float


# ---- engine -> front


UNREPORTED = Tower()


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has loaded the model and accepts requests."""

    kv_tokens: int  # tokens that fit in the KV cache
    context_length: int
    decided: tuple[tuple[str, str], ...]  # settings derived at start-up, to print: (name, value)
    tower: Tower = UNREPORTED


@dataclass(frozen=True, slots=True)
class Altered:
    """The result of an `Alter`, or the confirmation of a `Pause` or `Resume`."""

    id: int
    changed: Changed


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine or a worker has failed, at start-up or later, and exits."""

    error: str


@dataclass(frozen=True, slots=True)
class Loading:
    """The progress of start-up. Rank 0 reports it to the engine, which passes it on to the
    front end.
    """

    stage: str  # a description to print
    done: int = 0  # bytes
    total: int = 0  # bytes, or 0 if the stage does not count them


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Shows that the sender is alive. Sent at least every `child.HEARTBEAT_SECONDS`."""

    overdue: str = ""  # from the engine: why the current step takes too long, or ""


@dataclass(frozen=True, slots=True)
class MetricValues:
    """The current metrics of the process that sends them."""

    values: Values


@dataclass(frozen=True, slots=True)
class Output:
    """All updates for the front end from one iteration of the engine loop. Usually most fields
    are empty.
    """

    deltas: tuple[Delta, ...] = ()
    # images to decode, each into its slot in the arena. For each, the front end answers with
    # `PixelsReady`, `EmbeddingReady` or `PixelsFailed`.
    want: tuple[tuple[ImageKey, PixelSlot], ...] = ()
    unwanted: tuple[ImageKey, ...] = ()  # images no longer needed: cancel their decoding
    # images that the vision encoder has encoded: (key, milliseconds, end time), as in
    # `plan.StepResult`
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()
    aliases: Same = ()  # new aliases, which the front end may store for later runs


# ---- engine -> workers, in this order; then plans


@dataclass(frozen=True, slots=True)
class Load:
    """Load this rank's shard of the model. Every rank receives the same message."""

    # the weights
    folder: str
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    format: Literal["auto", "dummy"]
    threads: int
    parallel: ParallelConfig
    family_option: tuple[str, ...] = ()
    quantization: QuantizationMode = "auto"
    quantization_tower: TowerQuantization = "none"
    # the rest
    kv_dtype: KVDtype = "auto"
    role: Role = "all"  # "encode": load only the vision encoder
    attention: str = "auto"  # the requested attention backend
    graphs: bool = False  # capture CUDA graphs of the language model


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Allocate KV pages and caches, and capture CUDA graphs. Plans follow."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Finish:
    """The last message to a worker: finish writing cached data to disk, then exit."""


# ---- workers -> engine, in this order; then rank 0 answers plans, and all send heartbeats


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """The worker process has started, and has found `cuda_devices` GPUs."""

    cuda_devices: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to `Load`."""

    hardware: Hardware
    quantised: str = ""  # a summary of the quantized matrices, to print; "" if there are none
    # as in `KVConfig`, if requested and present in the checkpoint
    kv_scales: tuple[tuple[float, float], ...] = ()
    attention: str = "auto"  # the selected attention backend


@dataclass(frozen=True, slots=True)
class Started:
    """The answer to `StartWorker`."""

    # (key, tokens) of embeddings that an earlier run saved on disk, the oldest first
    saved: tuple[tuple[ImageKey, int], ...]
    store: str = ""  # the directory of embeddings shared with other servers, or ""
    tower: str = ""  # fingerprint of the vision encoder, if requested
    # (key, bytes on disk) of KV pages that an earlier run saved, the oldest first
    pages: tuple[tuple[bytes, int], ...] = ()
    # each request's results are bit-identical for any composition of the batch
    batch_invariant: bool = False
    # describes how `batch_invariant` and the kernels were determined, to print
    prepared: str = ""


ToEngine = (
    ServeModel
    | TokenizerText
    | Submit
    | Abort
    | PixelsReady
    | EmbeddingReady
    | PixelsFailed
    | Flush
    | Alter
    | Pause
    | Resume
    | Scrape
    | Stop
)
ToFront = Ready | Failed | Output | MetricValues | Heartbeat | Loading | Altered
ToWorker = Load | StartWorker | Plan | Masks | CancelSteps | Finish
FromWorker = (
    FoundDevices | Loaded | Started | StepResult | MetricValues | Heartbeat | Failed | Loading
)

FRONT_END: Codec[ToEngine, ToFront] = Codec(ToEngine, ToFront)
ENGINE_END: Codec[ToFront, ToEngine] = Codec(ToFront, ToEngine)
WORKERS_END: Codec[ToWorker, FromWorker] = Codec(ToWorker, FromWorker)
WORKER_END: Codec[FromWorker, ToWorker] = Codec(FromWorker, ToWorker)
