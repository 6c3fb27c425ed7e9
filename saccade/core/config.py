"""The resolved configuration of the engine, and properties of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
GIB = 1 << 30
DISK_BLOCK = 4096
"""The disk's allocation unit, in bytes. The header of an embedding file fills one such block."""

SCORE_BLOCK_BYTES = 32 * MIB
"""Maximum size of the float32 logits held at a time while a prompt is scored: 52 rows for a
vocabulary of 152,000 tokens.
"""

POSITION_CACHE_BYTES = 256 * MIB
"""Maximum size of the cache of position ids and learned position embeddings, keyed by image grid.
The learned embeddings of a 2560x1440 image take 33 MB on an 8B model.
"""

PAGE_PIECE_BYTES, PAGE_PIECES = 16 * MIB, 3
"""KV pages are copied between a GPU and the host in chunks of `PAGE_PIECE_BYTES`. At most
`PAGE_PIECES` chunks are in flight in each direction.
"""

Dtype = Literal["bfloat16", "float16", "float32"]
EncoderMode = Literal["weights", "data"]
QuantizationMode = Literal["auto", "int8", "int4", "none"]
TowerQuantization = Literal["none", "int8"]
KVDtype = Literal["auto", "fp8_e4m3"]
AllReduce = Literal["shm", "gloo", "nccl", "symm-mem"]
Role = Literal["all", "encode", "language"]
"""The part of a model that a server runs.

all: the vision encoder and the language model.
encode: only the vision encoder, for other servers.
language: the entire model, but encoder servers encode the images while any is available.
"""
PageView = Literal["text", "images", "both", "bare"]
"""What the model sees of a document's pages. bare: only their images, without text such as page
numbers.
"""


@dataclass(frozen=True, slots=True)
class DocumentView:
    """Which pages of a document the model sees, and whether as text, images or both."""

    shown: PageView = "both"
    pages: tuple[int, ...] = ()  # page numbers from 1, in the requested order; empty: all pages

    @property
    def has_images(self) -> bool:
        return self.shown != "text"

    @property
    def has_text(self) -> bool:
        return self.shown in ("text", "both")


WHOLE_DOCUMENT = DocumentView()


@dataclass(frozen=True, slots=True)
class Hardware:
    """The device and its memory, from which the sizes of caches are derived."""

    device: Literal["cpu", "cuda"]
    name: str
    total_bytes: int
    free_bytes: int  # free memory of the device after the weights were loaded
    host_free_bytes: int = 0
    """Free memory of the host of a GPU; 0 on a CPU, where `free_bytes` already counts it."""
    arch: int = 0
    """Compute capability of a GPU without the dot, such as 90 for 9.0."""

    @property
    def has_fp8(self) -> bool:
        """True if Saccade's kernels for the device support FP8."""
        return self.device == "cpu" or self.arch >= 89


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the model is sharded over ranks, and how ranks communicate."""

    size: int  # number of shards
    encoder: EncoderMode
    all_reduce: AllReduce
    step_timeout: float  # in seconds
    # expert parallelism: ranges that the experts are divided into; 1: sharded like other weights
    expert_runs: int = 1

    @property
    def ranks(self) -> int:
        """The number of processes. If it is greater than `size`, several of them hold the same
        shard.
        """
        return max(self.size, self.expert_runs)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The vision encoder's attention backend, CUDA graphs, quantization and position cache."""

    attention: str = "sdpa"
    graph_sizes: tuple[int, ...] = ()  # patch counts of CUDA graphs, ascending; empty: no graphs
    defer_graphs: bool = False  # as `StepGraphSizes.defer`
    role: Role = "all"
    quantization: TowerQuantization = "none"
    position_cache_bytes: int = POSITION_CACHE_BYTES  # 0: disabled
    rotary_kernel: bool = True  # False: apply RoPE with PyTorch's operations


@dataclass(frozen=True, slots=True)
class PageTierConfig:
    """The host and disk tiers that store KV pages evicted from the device."""

    folder: str | None = None  # the directory on disk; None: no disk tier
    disk_bytes: int = 0
    identity: bytes = b""  # `cache.content.PageIdentity.digest`: identifies the pages' content
    ranks: int = 1  # ranks that each hold a part of every page
    host_bytes: int = 0  # host memory per rank
    store: str = "disk"  # name of the disk tier's implementation

    def __bool__(self) -> bool:
        return self.folder is not None or self.host_bytes > 0


@dataclass(frozen=True, slots=True)
class KVConfig:
    """The data type, scales, attention backend and offload tiers of the KV cache."""

    dtype: KVDtype = "auto"  # auto: the model's own
    # divisors of each layer's keys and values in an 8-bit cache; empty: all are 1
    scales: tuple[tuple[float, float], ...] = ()
    attention: str = "auto"  # the attention backend
    pages: PageTierConfig = PageTierConfig()


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """How many snapshots of recurrent states (`family.KVSpec.state_bytes`) the prefix cache stores.

    All values are 0 for a model without recurrent states.
    """

    count: int = 0  # number of snapshots
    tokens: int = 0  # distance between the snapshots of a long prompt, in tokens
    between: int = 0  # further rows of state memory, for states between draft tokens

    @property
    def lines(self) -> int:
        """Rows of state memory, in addition to one row per slot."""
        return self.count + self.between

    @property
    def without_drafts(self) -> SnapshotConfig:
        """A configuration for a server without speculative decoding. The rows for draft tokens
        become snapshots.
        """
        return SnapshotConfig(self.lines if self.count else 0, self.tokens)


@dataclass(frozen=True, slots=True)
class StepGraphSizes:
    """The batch sizes for which CUDA graphs of the language model are captured, in ascending order.
    If empty, no graphs are used.
    """

    rows: tuple[int, ...] = ()  # batch sizes of decode-only steps
    # For steps that also prefill: there is a graph for each number of decoding sequences in
    # `mixed_rows` combined with each number of prefill tokens in `mixed_tokens`.
    mixed_rows: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    # Graphs that the first answer does not need are captured while no request runs.
    defer: bool = False

    @property
    def count(self) -> int:
        return len(self.rows) + len(self.mixed_rows) * len(self.mixed_tokens)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens in a graph that includes prefill, or 0 without such
        graphs.
        """
        return max(self.mixed_rows) + max(self.mixed_tokens) if self.mixed_tokens else 0


def embedding_file_bytes(nbytes: int) -> int:
    """Return the disk space of an embedding of `nbytes` bytes: one block for the header, then the
    data rounded up to whole blocks.
    """
    return DISK_BLOCK + -(-nbytes // DISK_BLOCK) * DISK_BLOCK


@dataclass(frozen=True, slots=True)
class EmbeddingBudgets:
    """The memory and disk space for image embeddings in each cache tier."""

    device_bytes: int  # per rank
    host_bytes: int = 0  # per rank
    disk_bytes: int = 0  # in `folder`, for all ranks, and for all servers if `shared`
    folder: str | None = None
    shared: bool = False  # other servers use the folder, too
    store: str = "disk"  # name of the disk tier's implementation


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of the engine and its workers after defaults are resolved."""

    # the device
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    # sequences and steps
    context_length: int
    max_running: int
    chunk_tokens: int
    # the KV cache
    page_size: int
    kv_pages: int  # including page 0, which is a dummy
    prefix_cache: bool
    # images
    embeddings: EmbeddingBudgets
    encode_patches: int
    chunk_aware: bool = True  # `SchedulerLimits.chunk_aware`
    kv: KVConfig = KVConfig()
    # the vision encoder's budget per step, in patches times blocks; 0: unlimited
    tower_budget: int = 0
    # maximum seconds of a step that prefills while other requests decode; 0: unlimited
    prompt_pause: float = 0.0
    encoder: EncoderConfig = EncoderConfig()
    graphs: StepGraphSizes = StepGraphSizes()
    snapshots: SnapshotConfig = SnapshotConfig()

    @property
    def kv_tokens(self) -> int:
        return (self.kv_pages - 1) * self.page_size
