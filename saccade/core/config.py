"""The resolved configuration, with properties of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
GIB = 1 << 30
DISK_BLOCK = 4096
"""Bytes of disk that a file takes at a time. The header of an embedding's file fills one."""

SCORE_BLOCK_BYTES = 32 * MIB
"""Logits in float32 that exist at a time while a prompt is scored: 52 rows of 152,000 tokens."""

POSITION_CACHE_BYTES = 256 * MIB
"""For what follows from grids of images. With learned positions, one of 2560x1440 takes 33 MB of it
on an 8B model.
"""

PAGE_PIECE_BYTES, PAGE_PIECES = 16 * MIB, 3
"""Of KV pages between a GPU and its host: copied at a time, and so many pieces under way each way.
"""

Dtype = Literal["bfloat16", "float16", "float32"]
EncoderMode = Literal["weights", "data"]
QuantizationMode = Literal["auto", "int8", "int4", "none"]
TowerQuantization = Literal["none", "int8"]
KVDtype = Literal["auto", "fp8_e4m3"]
AllReduce = Literal["shm", "gloo", "nccl", "symm-mem"]
Role = Literal["all", "encode", "language"]
"""What a server does of a model: all of it; only its vision tower, for others; or all, with images
encoded by others as long as they do.
"""
PageView = Literal["text", "images", "both", "bare"]
"""What a model sees of a document's pages. bare: images alone, without a word around them."""


@dataclass(frozen=True, slots=True)
class DocumentView:
    """How documents are shown. `pages`: numbers from 1, in the order wanted. Empty: all pages."""

    shown: PageView = "both"
    pages: tuple[int, ...] = ()

    @property
    def has_images(self) -> bool:
        return self.shown != "text"

    @property
    def has_text(self) -> bool:
        return self.shown in ("text", "both")


WHOLE_DOCUMENT = DocumentView()


@dataclass(frozen=True, slots=True)
class Hardware:
    """Machine facts that `resolve` needs.

    `free_bytes` is what the device has left after the weights were loaded.
    """

    device: Literal["cpu", "cuda"]
    name: str
    total_bytes: int
    free_bytes: int
    host_free_bytes: int = 0
    """Memory beside the device's own; 0 where they are one."""
    arch: int = 0
    """Compute capability of a GPU, 90 for 9.0."""

    @property
    def has_fp8(self) -> bool:
        """Return True if our kernels for the device can read and write FP8."""
        return self.device == "cpu" or self.arch >= 89


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How ranks divide the work."""

    size: int  # slices for everything that is cut
    encoder: EncoderMode
    all_reduce: AllReduce
    step_timeout: float
    # how many runs of whole experts there are; with 1, experts are cut like the rest
    expert_runs: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of processes. Beyond the slices, several hold the same slice."""
        return max(self.size, self.expert_runs)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The vision tower's configuration.

    `graph_sizes`: patch counts of CUDA graphs, ascending; empty without graphs. `role`: encode for
    other servers, or with other servers' help. `position_cache_bytes`: 0 disables the cache.
    `rotary_kernel`: False to rotate heads with PyTorch's operations.
    """

    attention: str = "sdpa"
    graph_sizes: tuple[int, ...] = ()
    role: Role = "all"
    quantization: TowerQuantization = "none"
    position_cache_bytes: int = POSITION_CACHE_BYTES
    rotary_kernel: bool = True


@dataclass(frozen=True, slots=True)
class PageTierConfig:
    """Tiers for KV pages.

    `disk_bytes` in `folder`'s files (None: the disk is unused), and `host_bytes` in each rank's
    host memory.
    """

    folder: str | None = None
    disk_bytes: int = 0
    # what the pages depend on (`store.PageIdentity.digest`). `ranks`: how many hold a part of
    # each page.
    identity: bytes = b""
    ranks: int = 1
    host_bytes: int = 0
    store: str = "disk"  # the file of `plugins/tiers/` that keeps them in `folder`

    def __bool__(self) -> bool:
        return self.folder is not None or self.host_bytes > 0


@dataclass(frozen=True, slots=True)
class KVConfig:
    """Storage for keys and values."""

    dtype: KVDtype = "auto"  # auto is the network's own
    # divisors for each layer's keys and values in an 8-bit cache; if empty, all are 1
    scales: tuple[tuple[float, float], ...] = ()
    attention: str = "auto"  # the backend that reads them
    pages: PageTierConfig = PageTierConfig()  # the tiers for evicted pages


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Snapshots for the prefix cache, taken from per-sequence states (`family.KVSpec.state_bytes`).

    Holds their count, and a long prompt's tokens per snapshot. between: lines behind the snapshots
    for the states between draft tokens. All are 0 for a model without states.
    """

    count: int = 0
    tokens: int = 0
    between: int = 0

    @property
    def lines(self) -> int:
        """Return the lines in the state memory, apart from the slots' own."""
        return self.count + self.between

    @property
    def without_drafts(self) -> SnapshotConfig:
        """Return the same memory for a server without draft tokens."""
        return SnapshotConfig(self.lines if self.count else 0, self.tokens)


@dataclass(frozen=True, slots=True)
class StepGraphSizes:
    """CUDA graph sizes for the language model; empty without graphs."""

    rows: tuple[int, ...] = ()  # row counts for steps that only decode
    mixed_rows: tuple[int, ...] = ()
    # token counts for prefill rows, each combined with each count in `mixed_rows` for decoding
    # rows. All ascending.
    mixed_tokens: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.rows) + len(self.mixed_rows) * len(self.mixed_tokens)

    @property
    def most_tokens(self) -> int:
        """Return the most tokens in a graph with prefill rows, or 0 without mixed graphs."""
        return max(self.mixed_rows) + max(self.mixed_tokens) if self.mixed_tokens else 0


def embedding_file_bytes(nbytes: int) -> int:
    """Return the disk bytes for an embedding's file: a header, and `nbytes` in whole blocks."""
    return DISK_BLOCK + -(-nbytes // DISK_BLOCK) * DISK_BLOCK


@dataclass(frozen=True, slots=True)
class EmbeddingBudgets:
    """Bytes for image embeddings in each tier.

    Budgets are per rank, except for the disk, which is in `folder`. `shared`: other servers write
    to the folder, too, and `disk_bytes` covers all servers. store: the file of `plugins/tiers/`
    that keeps them there.
    """

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    folder: str | None = None
    shared: bool = False
    store: str = "disk"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine runs by.

    `kv_pages` includes the dummy page 0. `tower_budget`: the vision encoder's patch-blocks in a
    step; 0: unbounded. `prompt_pause`: seconds of a step with prompts beside decoding rows; 0:
    unbounded. `chunk_aware`: as in `SchedulerLimits`.
    """

    # the device
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    # sequences and steps
    context_length: int
    max_running: int
    chunk_tokens: int
    # the KV cache
    page_size: int
    kv_pages: int
    prefix_cache: bool
    # images
    embeddings: EmbeddingBudgets
    encode_patches: int
    chunk_aware: bool = True
    kv: KVConfig = KVConfig()
    tower_budget: int = 0
    prompt_pause: float = 0.0
    encoder: EncoderConfig = EncoderConfig()
    graphs: StepGraphSizes = StepGraphSizes()
    snapshots: SnapshotConfig = SnapshotConfig()

    @property
    def kv_tokens(self) -> int:
        return (self.kv_pages - 1) * self.page_size
