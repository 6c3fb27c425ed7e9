"""The messages between front, engine and workers, over the socket pairs of `ipc/child.py`.

Pixels are never sent in messages: they are in the shared arena, located by a `PixelSlot`.
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
"""Absolute values of metrics: (name, label values, value)."""

Same = tuple[tuple[ImageKey, Image], ...]
"""(an image, another whose embedding serves it)."""

PEER_LOST_STATUS = 3
"""Exit status of a worker that ends because another has."""

# ---- boot messages of children


# ---- front -> engine


@dataclass(frozen=True, slots=True)
class ServeModel:
    """The first message: what to serve, once the front has read it. The arena has its size.

    plugins: options of each plugin that has an engine part, by the plugin's name.
    """

    folder: str
    model: ModelOptions
    engine: EngineOptions
    arena_bytes: int
    caches: CacheOptions
    role: Role = "all"
    settings: EngineSettings = EngineSettings()  # noqa: RUF009 - frozen
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """The tokenizer as `tokenizers.Tokenizer.to_str` writes it. Sent once, before the first request
    with a grammar.
    """

    tokenizer_json: str


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request. Its images' pixels come separately, unless they are needed no longer.

    aliases: images from an earlier run that have the same pixels (`Output.aliases`).
    """

    request: Request
    aliases: Same = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """The client has left, or a stop string was seen.

    Answered by a final delta (`abort`) unless the request has already ended.
    """

    id: str


@dataclass(frozen=True, slots=True)
class PixelsReady:
    """The image's pixels are in the slot named by `Output.want`, which is not written any more."""

    key: ImageKey
    pixels: bytes = b""  # their name, equal for images whose embeddings are equal, bit for bit
    # the names of its tiles, in the tower's order, where the tower sees tiles apart
    tiles: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingReady:
    """The slot named by `Output.want` holds the image's embedding instead of pixels.

    It is complete and as an equal vision tower made it. The slot stays unwritten from now on.
    """

    key: ImageKey


@dataclass(frozen=True, slots=True)
class PixelsFailed:
    """The image's decode failed or was cancelled. Its slot stays unwritten from now on.

    Every request waiting for a wanted image ends with this error.
    """

    key: ImageKey
    error: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Forget the KV prefix cache, except what running requests use.

    embeddings: also the embeddings, in every tier, and the kept pixels. Later requests start cold;
    requests in flight continue.
    """

    embeddings: bool


@dataclass(frozen=True, slots=True)
class Alter:
    """Make a change. Answered by `Altered` with the same id."""

    id: int
    change: Change


@dataclass(frozen=True, slots=True)
class Pause:
    """Let new requests wait. Answered by `Altered` once computing rests.

    abort: those in flight end with an error. wait: they are computed first. keep: they are frozen.
    """

    id: int
    mode: Literal["abort", "wait", "keep"]


@dataclass(frozen=True, slots=True)
class Resume:
    """End a pause, if there is one. Answered by `Altered`."""

    id: int


@dataclass(frozen=True, slots=True)
class Scrape:
    """A request for metrics. Answered by `MetricValues`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish running requests, then exit.

    Requests unfinished after `grace` seconds end with an error.
    """

    grace: float


# ---- engine -> front


UNREPORTED = Tower()


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has loaded the model.

    `decided` lists the decisions of start-up, for people: (name, value).
    """

    kv_tokens: int
    context_length: int
    decided: tuple[tuple[str, str], ...]
    tower: Tower = UNREPORTED


@dataclass(frozen=True, slots=True)
class Altered:
    """The outcome of `Alter`, or a carried out `Pause` or `Resume`."""

    id: int
    changed: Changed


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine or a worker must give up, at start-up or later, and exits."""

    error: str


@dataclass(frozen=True, slots=True)
class Loading:
    """Start-up progress, from rank 0 by way of the engine.

    Gives the `stage`, in words for people, and the bytes done. `total` 0: uncounted.
    """

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, sent at least every `child.HEARTBEAT_SECONDS`.

    overdue: from the engine, why a due step has yet to end; empty while steps continue.
    """

    overdue: str = ""


@dataclass(frozen=True, slots=True)
class MetricValues:
    """The sender's metrics."""

    values: Values


@dataclass(frozen=True, slots=True)
class Output:
    """The news from one turn of the engine loop for the front. Empty parts are usual."""

    deltas: tuple[Delta, ...] = ()
    # images to decode, each into its slot in the arena; answered by `PixelsReady`, `EmbeddingReady`
    # or `PixelsFailed`
    want: tuple[tuple[ImageKey, PixelSlot], ...] = ()
    unwanted: tuple[ImageKey, ...] = ()  # images needed no longer, whose decoding should stop
    # images run through the vision encoder, with the encoding's milliseconds and end time, as in
    # `plan.StepResult`
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()
    # images found to be aliases: their pixels are another image's, whose embedding serves both
    aliases: Same = ()


# ---- engine -> workers, in this order; then plans


@dataclass(frozen=True, slots=True)
class Load:
    """Load a slice of the model: the same on every rank.

    `role` "encode": only its tower. `attention`: the backend that the user wants. `graphs`: capture
    steps of the language model.
    """

    # the weights and their place
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
    role: Role = "all"
    attention: str = "auto"
    graphs: bool = False


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Allocate KV pages, caches and graphs for the plans to come."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Finish:
    """The last message: write everything that is to be kept, and exit."""


# ---- workers -> engine, in this order; then rank 0 answers plans, and all send heartbeats


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """The worker is running and sees `cuda_devices` GPUs."""

    cuda_devices: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Answers `Load`.

    `quantised`: the 8-bit matrices, for people; empty if all are wider. `kv_scales`: as in
    `KVConfig`, if asked for and in the checkpoint. `attention`: the chosen backend.
    """

    hardware: Hardware
    quantised: str = ""
    kv_scales: tuple[tuple[float, float], ...] = ()
    attention: str = "auto"


@dataclass(frozen=True, slots=True)
class Started:
    """Answers `StartWorker`.

    `saved`: (key, tokens) for embeddings that an earlier run has left on disk, the oldest first.
    `store`: the directory of shared embeddings, or "". `tower`: its
    fingerprint, if requested. `pages`: (name, disk bytes) for KV pages that an earlier
    run has left, the oldest first. `batch_invariant`: whether rows are batch-invariant: equal to
    the bit beside any number of others. `prepared`: how that and the kernels came to be known, for
    people.
    """

    saved: tuple[tuple[ImageKey, int], ...]
    store: str = ""
    tower: str = ""
    pages: tuple[tuple[bytes, int], ...] = ()
    batch_invariant: bool = False
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
