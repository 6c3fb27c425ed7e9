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

Dtype = Literal["bfloat16", "float16", "float32"]
EncoderMode = Literal["weights", "data"]
EncoderAttention = Literal["triton", "flash", "sdpa"]
QuantizationMode = Literal["auto", "int8", "none"]
PatchEmbedding = Literal["exact", "folded"]
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


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the ranks share the work."""

    size: int
    encoder: EncoderMode
    all_reduce: AllReduce
    step_timeout: float


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """How the vision tower runs.

    `graph_sizes`: patch counts to capture CUDA graphs at, ascending; none without graphs.
    """

    attention: EncoderAttention = "sdpa"
    graph_sizes: tuple[int, ...] = ()


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
    patch-blocks of the vision tower in a step; 0: no bound. `decode_graph_sizes`: numbers of rows
    to capture CUDA graphs of the language model at, ascending; none without graphs. `role`
    "encode": no page and no row will ever be asked for.
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
    tower_budget: int = 0
    encoder: EncoderConfig = EncoderConfig()
    decode_graph_sizes: tuple[int, ...] = ()
    role: Role = "all"

    @property
    def kv_tokens(self) -> int:
        return (self.kv_pages - 1) * self.page_size
