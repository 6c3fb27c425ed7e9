"""What start-up has decided, in which nothing is left open, and facts of the machine."""

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

Dtype = Literal["bfloat16", "float16", "float32"]
EncoderMode = Literal["weights", "data"]
EncoderAttention = Literal["triton", "flash", "cudnn", "fa3", "fa4", "sdpa"]
LanguageAttention = Literal["triton", "x86", "sdpa", "reference", "fa3", "flashinfer"]
"""Names of `kernels/attention_backends.py`."""
QuantizationMode = Literal["auto", "int8", "int4", "none"]
KVDtype = Literal["auto", "fp8_e4m3"]
AllReduce = Literal["shm", "gloo", "nccl", "symm-mem"]
Role = Literal["all", "encode", "language"]
"""What a server does of a model: all of it; only its vision tower, for others; or all, with images
encoded by others as long as they do.
"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Facts of the machine that `resolve` needs.

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
        """Whether our kernels for the device can read and write FP8."""
        return self.device == "cpu" or self.arch >= 89


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the ranks share the work.

    size: slices of all that is cut. expert_runs: among how many runs of whole experts the ranks are
    divided; 1: none, experts are cut as the rest.
    """

    size: int
    encoder: EncoderMode
    all_reduce: AllReduce
    step_timeout: float
    expert_runs: int = 1

    @property
    def ranks(self) -> int:
        """Processes; where there are more than slices, several hold the same one."""
        return max(self.size, self.expert_runs)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """How the vision tower runs.

    `graph_sizes`: patch counts to capture CUDA graphs at, ascending; none without graphs. `role`:
    whether it runs for others, or others for it.
    """

    attention: EncoderAttention = "sdpa"
    graph_sizes: tuple[int, ...] = ()
    role: Role = "all"


@dataclass(frozen=True, slots=True)
class KVConfig:
    """How keys and values are kept, and what reads them.

    dtype: auto is the network's own. scales: of an 8-bit cache, what keys and values of each layer
    are divided by; none are ones. attention: auto is the first that runs.
    """

    dtype: KVDtype = "auto"
    scales: tuple[tuple[float, float], ...] = ()
    attention: Literal["auto", LanguageAttention] = "auto"


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Of what the model keeps per sequence (`family.KVSpec.state_bytes`), for the prefix cache: how
    many, and one in so many tokens of a long prompt. 0 where the model keeps nothing.
    """

    count: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepGraphSizes:
    """Where CUDA graphs of the language model's steps are captured; nothing without graphs.

    rows: numbers of rows, for steps that only decode. mixed_tokens: numbers of tokens of other
    rows, each beside each of `mixed_rows` rows that decode. All ascending.
    """

    rows: tuple[int, ...] = ()
    mixed_rows: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.rows) + len(self.mixed_rows) * len(self.mixed_tokens)

    @property
    def most_tokens(self) -> int:
        """Of a step with other rows than those that decode; 0 where no graph is for such."""
        return max(self.mixed_rows) + max(self.mixed_tokens) if self.mixed_tokens else 0


def embedding_file_bytes(nbytes: int) -> int:
    """What an embedding of `nbytes` takes of a disk as a file: its header, and whole blocks."""
    return DISK_BLOCK + -(-nbytes // DISK_BLOCK) * DISK_BLOCK


@dataclass(frozen=True, slots=True)
class EmbeddingBudgets:
    """Bytes for picture embeddings in each tier: per rank, but for the disk, which is in
    `folder`. `shared`: other servers write there, too, and `disk_bytes` are all servers'.
    """

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    folder: str | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine runs by. `kv_pages` includes the dummy page 0. `tower_budget`:
    patch-blocks of the vision tower in a step; 0: no bound.
    """

    device: Literal["cpu", "cuda"]
    dtype: Dtype
    context_length: int
    max_running: int
    chunk_tokens: int
    page_size: int
    kv_pages: int
    prefix_cache: bool
    embeddings: EmbeddingBudgets
    encode_patches: int
    kv: KVConfig = KVConfig()
    tower_budget: int = 0
    encoder: EncoderConfig = EncoderConfig()
    graphs: StepGraphSizes = StepGraphSizes()
    snapshots: SnapshotConfig = SnapshotConfig()

    @property
    def kv_tokens(self) -> int:
        return (self.kv_pages - 1) * self.page_size
