"""The resolved configuration, and properties of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
GIB = 1 << 30
DISK_BLOCK = 4096
"""The disk's allocation unit in bytes. The header of an embedding's file fills one block."""

SCORE_BLOCK_BYTES = 32 * MIB
"""Maximum size of float32 logits while a prompt is scored: 52 rows of 152,000 tokens."""

POSITION_CACHE_BYTES = 256 * MIB
"""Size of the cache of positions and learned position embeddings, by image grid. With the latter,
an image of 2560x1440 takes 33 MB on an 8B model.
"""

PAGE_PIECE_BYTES, PAGE_PIECES = 16 * MIB, 3
"""KV pages are copied between a GPU and the host in chunks of this size, with at most this many
chunks in flight in each direction.
"""

Dtype = Literal["bfloat16", "float16", "float32"]
EncoderMode = Literal["weights", "data"]
QuantizationMode = Literal["auto", "int8", "int4", "none"]
TowerQuantization = Literal["none", "int8"]
KVDtype = Literal["auto", "fp8_e4m3"]
AllReduce = Literal["shm", "gloo", "nccl", "symm-mem"]
Role = Literal["all", "encode", "language"]
"""The part of a model that a server runs: all of it; only the vision encoder, for other servers; or
all of it, but with images encoded by encoder servers while these are available.
"""
PageView = Literal["text", "images", "both", "bare"]
"""What the model gets of a document's pages. bare: only images, without any text around them."""


@dataclass(frozen=True, slots=True)
class DocumentView:
    """How a document is given to the model."""

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
    """Properties of the host that sizing depends on."""

    device: Literal["cpu", "cuda"]
    name: str
    total_bytes: int
    free_bytes: int  # of the device, after the weights were loaded
    host_free_bytes: int = 0
    """Free memory of a GPU's host; 0 on a CPU, where device and host are one."""
    arch: int = 0
    """Compute capability of a GPU: 90 for 9.0."""

    @property
    def has_fp8(self) -> bool:
        """True if Saccade's kernels for the device support FP8."""
        return self.device == "cpu" or self.arch >= 89


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How ranks share the model."""

    size: int  # number of shards
    encoder: EncoderMode
    all_reduce: AllReduce
    step_timeout: float  # in seconds
    # expert parallelism: ranges that the experts are divided into; 1: sharded like other weights
    expert_runs: int = 1

    @property
    def ranks(self) -> int:
        """The number of processes. If it exceeds `size`, shards are replicated."""
        return max(self.size, self.expert_runs)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The vision encoder's configuration."""

    attention: str = "sdpa"
    graph_sizes: tuple[int, ...] = ()  # patch counts of CUDA graphs, ascending; empty: no graphs
    defer_graphs: bool = False  # as `StepGraphSizes.defer`
    role: Role = "all"
    quantization: TowerQuantization = "none"
    position_cache_bytes: int = POSITION_CACHE_BYTES  # 0: disabled
    rotary_kernel: bool = True  # False: apply RoPE with PyTorch's operations


@dataclass(frozen=True, slots=True)
class PageTierConfig:
    """Tiers for KV pages that are evicted from the device."""

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
    """Storage for keys and values."""

    dtype: KVDtype = "auto"  # auto: the model's own
    # divisors of each layer's keys and values in an 8-bit cache; empty: all are 1
    scales: tuple[tuple[float, float], ...] = ()
    attention: str = "auto"  # the attention backend
    pages: PageTierConfig = PageTierConfig()


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Snapshots of per-sequence states (`family.KVSpec.state_bytes`) for the prefix cache.

    All values are 0 for a model without states.
    """

    count: int = 0  # number of snapshots
    tokens: int = 0  # distance between the snapshots of a long prompt, in tokens
    between: int = 0  # further rows of state memory, for states between draft tokens

    @property
    def lines(self) -> int:
        """Rows of state memory, not counting the slots' own."""
        return self.count + self.between

    @property
    def without_drafts(self) -> SnapshotConfig:
        """The configuration with the same memory for a server without speculative decoding."""
        return SnapshotConfig(self.lines if self.count else 0, self.tokens)


@dataclass(frozen=True, slots=True)
class StepGraphSizes:
    """CUDA graph sizes of the language model, ascending; empty: no graphs."""

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
        """Maximum tokens of a graph that includes prefill; 0 without such graphs."""
        return max(self.mixed_rows) + max(self.mixed_tokens) if self.mixed_tokens else 0


def embedding_file_bytes(nbytes: int) -> int:
    """Return an embedding's size on disk: a header block, and `nbytes` rounded up to blocks."""
    return DISK_BLOCK + -(-nbytes // DISK_BLOCK) * DISK_BLOCK


@dataclass(frozen=True, slots=True)
class EmbeddingBudgets:
    """Bytes for image embeddings in each tier."""

    device_bytes: int  # per rank
    host_bytes: int = 0  # per rank
    disk_bytes: int = 0  # in `folder`, for all ranks, and for all servers if `shared`
    folder: str | None = None
    shared: bool = False  # other servers use the folder, too
    store: str = "disk"  # name of the disk tier's implementation


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's configuration."""

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
