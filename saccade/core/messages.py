"""What front, engine and workers say to each other, over the socket pairs of `core/child.py`.

Pixels never travel here: they lie in the shared arena and a `PixelSlot` says where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.child import Codec
from saccade.core.config import (
    Dtype,
    EngineConfig,
    Hardware,
    KVDtype,
    ParallelConfig,
    QuantizationMode,
    Role,
)
from saccade.core.options import EngineOptions, ModelOptions, ParallelOptions, PinOptions
from saccade.core.plan import Masks, PixelSlot, Plan, StepResult
from saccade.core.types import Delta, ImageKey, Request, Tower

Values = tuple[tuple[str, tuple[str, ...], float], ...]
"""Absolute values of metrics: (name, label values, value)."""

PEER_LOST_STATUS = 3
"""Exit status of a worker that ends because another has."""

# ---- what a child is told when it is started


@dataclass(frozen=True, slots=True)
class EngineBoot:
    """To the engine. `arena_fd` is inherited."""

    folder: str
    model: ModelOptions
    engine: EngineOptions
    parallel: ParallelOptions
    arena_fd: int
    arena_bytes: int
    pins: PinOptions
    role: Role = "all"


@dataclass(frozen=True, slots=True)
class WorkerBoot:
    """To the worker of `rank`. Both descriptors are inherited; over `group_fd` the ranks meet
    (`parallel.join`).
    """

    rank: int
    group_fd: int
    arena_fd: int
    arena_bytes: int


# ---- front -> engine


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """The first message: the tokenizer, as `tokenizers.Tokenizer.to_str` writes it, for grammars.
    Empty: no request will have one.
    """

    tokenizer_json: str


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request. Its pictures' pixels come separately, or never if they are not needed."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The client has left, or a stop string was seen.

    Answered by a final delta (`abort`) unless the request has already ended.
    """

    id: str


@dataclass(frozen=True, slots=True)
class PixelsReady:
    """The image's pixels lie in the slot that `Output.want` named, and nothing writes there any
    more.
    """

    key: ImageKey


@dataclass(frozen=True, slots=True)
class EmbeddingReady:
    """Instead of the image's pixels its embedding lies in the slot that `Output.want` named, whole
    and as an equal vision tower made it; nothing writes there any more.
    """

    key: ImageKey


@dataclass(frozen=True, slots=True)
class PixelsFailed:
    """The image cannot be decoded, or its decode was called off; nothing writes to its slot any
    more. Every request that waits for an image that was wanted ends with this error.
    """

    key: ImageKey
    error: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Forget what the KV prefix cache holds and no running request uses.

    embeddings: and the embeddings, in every tier, and the kept pixels. Requests that are submitted
    later find none of these; requests in flight go on.
    """

    embeddings: bool


@dataclass(frozen=True, slots=True)
class Scrape:
    """Somebody wants to see metrics. Answered by `Figures`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what runs, then exit.

    Requests still unfinished after `grace` seconds end with an error.
    """

    grace: float


# ---- engine -> front


UNTOLD = Tower()


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has loaded the model.

    `decided` lists what start-up decided, for people: (name, value).
    """

    kv_tokens: int
    context_length: int
    decided: tuple[tuple[str, str], ...]
    tower: Tower = UNTOLD


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine, or a worker, cannot go on (at start-up or later). It exits after this."""

    error: str


@dataclass(frozen=True, slots=True)
class Loading:
    """How far start-up is, from rank 0 by way of the engine: `stage`, in words for people, and the
    bytes of it that are done. `total` 0: nobody counts.
    """

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life, sent at least every `child.HEARTBEAT_SECONDS`.

    overdue: from the engine, why no step ends though one is due; empty while steps go on.
    """

    overdue: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Values of the sender's metrics."""

    values: Values


@dataclass(frozen=True, slots=True)
class Output:
    """What one turn of the engine loop has for the front; empty parts are usual.

    want: images to decode, each into its slot of the arena; answered by `PixelsReady`,
    `EmbeddingReady` or `PixelsFailed`. unwanted: images, wanted before, that nobody needs any more:
    stop decoding them.
    encoded: images that were run through the vision tower, the ms that took, and when it was
    done, as in `plan.StepResult`.
    """

    deltas: tuple[Delta, ...] = ()
    want: tuple[tuple[ImageKey, PixelSlot], ...] = ()
    unwanted: tuple[ImageKey, ...] = ()
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()


# ---- engine -> workers, in this order; then plans


@dataclass(frozen=True, slots=True)
class Load:
    """Load a slice of the model: the same on every rank. `role` "encode": of its tower alone."""

    folder: str
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    format: Literal["auto", "dummy"]
    threads: int
    parallel: ParallelConfig
    family_option: tuple[str, ...] = ()
    quantization: QuantizationMode = "auto"
    kv_dtype: KVDtype = "auto"
    role: Role = "all"


@dataclass(frozen=True, slots=True)
class Begin:
    """Make what plans need: KV pages, caches, graphs."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Finish:
    """No plan follows: write what is to be kept, and exit."""


# ---- workers -> engine, in this order; then rank 0 answers plans, and all say that they live


@dataclass(frozen=True, slots=True)
class Found:
    """The worker is there; how many CUDA devices it sees."""

    cuda_devices: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Answers `Load`. `quantised`: what is in 8 bits, for people; nothing where nothing is.
    `kv_scales`: of `KVConfig`, where they are asked for and the checkpoint has any.
    """

    hardware: Hardware
    quantised: str = ""
    kv_scales: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """Answers `Begin`. `saved`: (key, tokens) of embeddings that an earlier run has left on disk,
    the oldest first. `store`: where embeddings lie that other servers write, too; "" for nowhere.
    `tower`: its fingerprint, where that was asked for. `pages`: (name, bytes of disk) of KV pages
    that an earlier run has left, the oldest first.
    """

    saved: tuple[tuple[ImageKey, int], ...]
    store: str = ""
    tower: str = ""
    pages: tuple[tuple[bytes, int], ...] = ()


ToEngine = (
    TokenizerText
    | Submit
    | Abort
    | PixelsReady
    | EmbeddingReady
    | PixelsFailed
    | Flush
    | Scrape
    | Stop
)
ToFront = Ready | Failed | Output | Figures | Alive | Loading
ToWorker = Load | Begin | Plan | Masks | Finish
FromWorker = Found | Loaded | Begun | StepResult | Figures | Alive | Failed | Loading

FRONT_END: Codec[ToEngine, ToFront] = Codec(ToEngine, ToFront)
ENGINE_END: Codec[ToFront, ToEngine] = Codec(ToFront, ToEngine)
WORKERS_END: Codec[ToWorker, FromWorker] = Codec(ToWorker, FromWorker)
WORKER_END: Codec[FromWorker, ToWorker] = Codec(FromWorker, ToWorker)
