"""What the user may set: the command line's options, and the environment.

Each field of `ModelOptions`, `EngineOptions`, `ParallelOptions`, `MediaOptions` and `ServerOptions`
is one option; the string below it is its help; None means "derive it". This is the only module that
reads the environment. It does not know how an open option is decided: that is `engine/sizing.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.core.bounds import above, at_least, at_most
from saccade.core.config import (
    MIB,
    AllReduce,
    Dtype,
    EncoderAttention,
    EncoderMode,
    PatchEmbedding,
)
from saccade.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to serve."""

    dtype: Literal["auto", Dtype] = "auto"
    """Number format of weights and KV cache. auto: the checkpoint's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. auto: cuda if there is one."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights from config.json alone, to measure speed without a checkpoint."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    chat_template: str | None = None
    """A file with a chat template to use instead of the checkpoint's."""
    context_length: int | None = None
    """Longest prompt plus answer, in tokens. Derived: the model's own limit."""
    patch_embed: PatchEmbedding = "exact"
    """exact: pixels are normalised as the model's own processor does it. folded: that, and the
    second frame of a still picture, are part of the first layer's weights: less work, as exact on
    average, not the same bits.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "context_length")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine schedules and what it keeps."""

    max_running_requests: int | None = None
    """Requests generated side by side; more wait. Derived: 32 on cpu, 256 on cuda."""
    chunked_prefill_size: int | None = None
    """Tokens computed per step; longer prompts are cut into chunks.

    Derived: 2048 on cpu, 8192 on cuda.
    """
    page_size: int = 16
    """Tokens per KV page; the prefix cache reuses whole pages."""
    mem_fraction_static: float | None = None
    """On cuda: share of the device's memory for weights and KV cache together. On cpu: share of
    what is free that the KV cache may take.
    Derived: 0.85 on cuda, 0.5 on cpu.
    """
    max_total_tokens: int | None = None
    """Tokens that the KV cache holds, if fewer than memory allows."""
    disable_radix_cache: bool = False
    """Do not reuse the KV of prompts seen before."""
    embedding_cache_device_mb: int | None = None
    """Device memory for picture embeddings.

    Derived: a tenth of what weights and KV cache leave free, more for models of large ones.
    """
    embedding_cache_host_mb: int | None = None
    """Host memory for embeddings that the device has no room for.

    Derived: a quarter of what is free on cuda; 0 on cpu, where it is one.
    """
    embedding_cache_disk_mb: int | None = None
    """Disk space for embeddings, which survive a restart.

    Derived: a quarter of what is free there or taken by saved embeddings already.
    """
    embedding_cache_dir: str | None = None
    """Folder for embeddings on disk. Derived: none are kept on disk."""
    max_encode_patches: int | None = None
    """Picture patches encoded per step (one picture always may).

    Derived: 16384 on cpu, 65536 on cuda.
    """
    mm_attention_backend: Literal["auto", EncoderAttention] = "auto"
    """Attention of the vision tower. flash: torch's variable-length flash attention (cuda, 16
    bits). sdpa: a call per picture size.
    auto: flash where it works.
    """
    disable_vit_graph: bool = False
    """Do not replay CUDA graphs of the vision tower."""
    vit_graph_buckets: tuple[int, ...] = ()
    """Patch counts to capture CUDA graphs of the vision tower at; larger packs run without.

    Derived: 19 from 128 to 8192.
    """
    threads: int | None = None
    """CPU threads of the engine. Derived: the cores this process may use."""

    def __post_init__(self) -> None:
        at_least(
            1,
            self,
            "max_running_requests",
            "chunked_prefill_size",
            "page_size",
            "max_total_tokens",
            "max_encode_patches",
            "threads",
        )
        at_least(
            0,
            self,
            "embedding_cache_device_mb",
            "embedding_cache_host_mb",
            "embedding_cache_disk_mb",
        )
        above(0, self, "mem_fraction_static")
        at_most(0.98, self, "mem_fraction_static")
        if self.embedding_cache_dir == "":
            raise ConfigError("--embedding-cache-dir: name a folder")
        if self.embedding_cache_disk_mb and self.embedding_cache_dir is None:
            raise ConfigError("--embedding-cache-disk-mb: say where, with --embedding-cache-dir")


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How one model is spread over several processes."""

    tp_size: int = 1
    """Tensor parallelism: processes (on cuda: GPUs) that share one model."""
    mm_encoder_tp_mode: Literal["auto", EncoderMode] = "auto"
    """How they share the vision tower. weights: each holds a slice. data: each holds all of it and
    takes its part of the pictures.
    auto: weights, unless the tower does not divide or its slices would be too narrow.
    """
    all_reduce: Literal["auto", AllReduce] = "auto"
    """How they add up.

    auto: shm (memory they share) on cpu, or gloo where the processor is not x86; nccl on cuda.
    """
    step_timeout: float | None = None
    """Seconds after which a step is taken to be stuck, and the server ends.

    Derived: 120 on cuda, 1200 on cpu.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "tp_size")
        above(0, self, "step_timeout")


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Where pictures may come from, and what they may cost."""

    max_image_pixels: int = 178_956_970
    """Largest picture, in pixels of its header; refused before decoding."""
    max_image_bytes: int = 64 * MIB
    """Largest encoded picture, in bytes."""
    max_images_per_request: int = 256
    """Most pictures in one request."""
    media_workers: int | None = None
    """Processes that decode pictures. Derived: half the cores, at least 1."""
    arena_mb: int = 512
    """Shared memory for decoded pictures on their way to the engine, with room for one of the
    model's largest at least; when it is full, decoding waits.
    """
    fetch_timeout: float = 10.0
    """Seconds to fetch one picture by URL, in all."""
    decode_timeout: float = 20.0
    """Seconds to decode one picture."""
    allowed_media_domains: tuple[str, ...] = ()
    """Fetch pictures from this host only; repeat the option for several.

    Derived: any public host.
    """
    allow_private_media: bool = False
    """Also fetch from private, loopback and link-local addresses."""
    allowed_local_media_path: str | None = None
    """Allow file: URLs below this folder."""
    files_dir: str | None = None
    """Folder for files uploaded with /v1/files; it may be shared by servers.

    Derived: saccade/files in the user's cache folder.
    """
    files_mb: int = 4096
    """Disk space for uploaded files; when it is used up, uploads are refused until some are deleted
    or expire.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "max_image_pixels", "max_image_bytes", "media_workers")
        at_least(0, self, "max_images_per_request", "files_mb")
        above(0, self, "fetch_timeout", "decode_timeout")

    @property
    def workers(self) -> int:
        """Processes that decode pictures."""
        return self.media_workers or max(1, usable_cores() // 2)

    @property
    def files_folder(self) -> Path:
        """Where uploaded files are kept."""
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(self.files_dir or f"{cache}/saccade/files").expanduser()


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the HTTP server listens and whom it lets in."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 opens the server to the network: set --api-key then."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    api_key: str | None = None
    """Ask clients for this key (Authorization: Bearer KEY).

    Also read from SACCADE_API_KEY, which keeps it out of process lists.
    """
    served_model_name: tuple[str, ...] = ()
    """Name the API answers to; repeat the option for several.

    Derived: the model as given on the command line.
    """
    cors_origins: tuple[str, ...] = ()
    """Browser origin that may call the API; repeat the option for several."""
    max_body_mb: int = 256
    """Largest request body."""
    max_inflight_mb: int | None = None
    """Bodies and encoded pictures held for requests in flight; what would exceed it is answered
    429. Derived: a quarter of memory.
    """
    max_queued_requests: int = 1024
    """Requests in flight, running and waiting; more are answered 429."""
    shutdown_grace: float = 30.0
    """Seconds that running requests get to finish when the server is told to stop."""
    log_requests: bool = False
    """Log a line for every request: tokens, pictures, times."""
    log_slow_seconds: float | None = None
    """Log what became of each picture of requests that take longer than this."""

    def __post_init__(self) -> None:
        at_least(0, self, "port", "shutdown_grace", "log_slow_seconds")
        at_least(1, self, "max_body_mb", "max_inflight_mb", "max_queued_requests")
        at_most(65535, self, "port")

    @property
    def key(self) -> str | None:
        """The key that clients must send, if any."""
        return self.api_key or os.environ.get("SACCADE_API_KEY")

    @property
    def inflight_bytes(self) -> int:
        """Bytes that may be held for requests in flight."""
        if self.max_inflight_mb is not None:
            return self.max_inflight_mb * MIB
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


OPENMP_SPINS = "4000"
"""Turns that an OpenMP thread of the engine waits before it sleeps, some tens of microseconds.
Without end, as is the library's choice, threads that share their cores with anything else wait for
each other's time slices: 40 times slower. Not at all, and each operation of a small model waits for
threads to wake: 1.6 times slower where nothing else runs (LOG.md).
"""


def engine_environment() -> dict[str, str]:
    """The environment of the engine process: what the user has, and a bound on OpenMP's spinning
    unless the user has set one.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return dict(os.environ)
    return {**os.environ, "GOMP_SPINCOUNT": OPENMP_SPINS}


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))
