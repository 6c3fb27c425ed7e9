"""What the user may set, and what start-up makes of it.

`ModelOptions`, `EngineOptions`, `ParallelOptions`, `MediaOptions` and `ServerOptions` are the command line: each field is one option,
the string below it is its help, None means "derive it". `resolve` and `resolve_parallel` turn them, with facts of the model and the
machine, into configurations in which nothing is left open. This is the only module that reads the environment.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from saccade.core.bounds import above, at_least, at_most
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec

MIB = 1 << 20
GIB = 1 << 30

Dtype = Literal["bfloat16", "float16", "float32"]
EncoderMode = Literal["weights", "data"]
EncoderAttention = Literal["flash", "sdpa"]
PatchEmbedding = Literal["exact", "folded"]
AllReduce = Literal["shm", "gloo", "nccl", "symm-mem"]

LARGEST_TP = 64
VIT_GRAPH_SIZES = (128, 256, *(base * step // 4 for base in (512, 1024, 2048, 4096) for step in range(4, 8)), 8192)
"""Patches. Steps of a quarter and less: what pads is computed in vain. Larger packs keep a GPU busy without a graph."""
LARGEST_PICTURES = 4
"""The embedding cache has room for so many of the largest pictures, where memory allows."""
NARROW_ENCODER = 256
"""Below this many values per rank, cutting the vision tower's matrices costs more in collectives than it saves."""


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
    """exact: pixels are normalised as the model's own processor does it. folded: that, and the second frame of a still picture, are part of
    the first layer's weights: less work, as exact on average, not the same bits."""

    def __post_init__(self) -> None:
        at_least(1, self, "context_length")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine schedules and what it keeps."""

    max_running_requests: int | None = None
    """Requests generated side by side; more wait. Derived: 32 on cpu, 256 on cuda."""
    chunked_prefill_size: int | None = None
    """Tokens computed per step; longer prompts are cut into chunks. Derived: 2048 on cpu, 8192 on cuda."""
    page_size: int = 16
    """Tokens per KV page; the prefix cache reuses whole pages."""
    mem_fraction_static: float | None = None
    """On cuda: share of the device's memory for weights and KV cache together. On cpu: share of what is free that the KV cache may take.
    Derived: 0.85 on cuda, 0.5 on cpu."""
    max_total_tokens: int | None = None
    """Tokens that the KV cache holds, if fewer than memory allows."""
    disable_radix_cache: bool = False
    """Do not reuse the KV of prompts seen before."""
    embedding_cache_device_mb: int | None = None
    """Device memory for picture embeddings. Derived: a tenth of what weights and KV cache leave free, more for models of large ones."""
    embedding_cache_host_mb: int | None = None
    """Host memory for embeddings that the device has no room for. Derived: a quarter of what is free on cuda; 0 on cpu, where it is one."""
    embedding_cache_disk_mb: int | None = None
    """Disk space for embeddings, which survive a restart. Derived: a quarter of what is free there or taken by this model's already."""
    embedding_cache_dir: str | None = None
    """Folder for embeddings on disk. Derived: none are kept on disk."""
    max_encode_patches: int | None = None
    """Picture patches encoded per step (one picture always may). Derived: 16384 on cpu, 65536 on cuda."""
    mm_attention_backend: Literal["auto", EncoderAttention] = "auto"
    """Attention of the vision tower. flash: torch's variable-length flash attention (cuda, 16 bits). sdpa: a call per picture size.
    auto: flash where it works."""
    disable_vit_graph: bool = False
    """Do not replay CUDA graphs of the vision tower."""
    vit_graph_buckets: tuple[int, ...] = ()
    """Patch counts to capture CUDA graphs of the vision tower at; larger packs run without. Derived: 19 from 128 to 8192."""
    threads: int | None = None
    """CPU threads of the engine. Derived: the cores this process may use."""

    def __post_init__(self) -> None:
        at_least(1, self, "max_running_requests", "chunked_prefill_size", "page_size", "max_total_tokens", "max_encode_patches", "threads")
        at_least(0, self, "embedding_cache_device_mb", "embedding_cache_host_mb", "embedding_cache_disk_mb")
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
    """How they share the vision tower. weights: each holds a slice. data: each holds all of it and takes its part of the pictures.
    auto: weights, unless the tower does not divide or its slices would be too narrow."""
    all_reduce: Literal["auto", AllReduce] = "auto"
    """How they add up. auto: shm (memory they share) on cpu, or gloo where the processor is not x86; nccl on cuda."""
    step_timeout: float | None = None
    """With several processes: seconds after which a step is taken to be stuck, and the server ends. Derived: 120 on cuda, 1200 on cpu."""

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
    """Shared memory for decoded pictures on their way to the engine, with room for one of the model's largest at least;
    when it is full, decoding waits."""
    fetch_timeout: float = 10.0
    """Seconds to fetch one picture by URL, in all."""
    decode_timeout: float = 20.0
    """Seconds to decode one picture."""
    allowed_media_domains: tuple[str, ...] = ()
    """Fetch pictures from this host only; repeat the option for several. Derived: any public host."""
    allow_private_media: bool = False
    """Also fetch from private, loopback and link-local addresses."""
    allowed_local_media_path: str | None = None
    """Allow file: URLs below this folder."""
    files_dir: str | None = None
    """Folder for files uploaded with /v1/files; it may be shared by servers. Derived: saccade/files in the user's cache folder."""
    files_mb: int = 4096
    """Disk space for uploaded files; when it is used up, uploads are refused until some are deleted or expire."""

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
    """Ask clients for this key (Authorization: Bearer KEY). Also read from SACCADE_API_KEY, which keeps it out of process lists."""
    served_model_name: tuple[str, ...] = ()
    """Name the API answers to; repeat the option for several. Derived: the model as given on the command line."""
    cors_origins: tuple[str, ...] = ()
    """Browser origin that may call the API; repeat the option for several."""
    max_body_mb: int = 256
    """Largest request body."""
    max_inflight_mb: int | None = None
    """Bodies and encoded pictures held for requests in flight; what would exceed it is answered 429. Derived: a quarter of memory."""
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


@dataclass(frozen=True, slots=True)
class Hardware:
    """Facts of the machine that `resolve` needs. `free_bytes` is what the device has left after the weights were loaded."""

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
    """How the vision tower runs. `graph_sizes`: patch counts to capture CUDA graphs at, ascending; none without graphs."""

    attention: EncoderAttention = "sdpa"
    graph_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingBudgets:
    """Bytes for picture embeddings in each tier: per rank, but for the disk, which is in `folder`."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine runs by. `kv_pages` includes the dummy page 0."""

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
    encoder: EncoderConfig = EncoderConfig()

    @property
    def kv_tokens(self) -> int:
        return (self.kv_pages - 1) * self.page_size


OPENMP_SPINS = "4000"
"""Turns that an OpenMP thread of the engine waits before it sleeps, some tens of microseconds. Without end, as is the library's choice,
threads that share their cores with anything else wait for each other's time slices: 40 times slower. Not at all, and each operation of a
small model waits for threads to wake: 1.6 times slower where nothing else runs (LOG.md)."""


def engine_environment() -> dict[str, str]:
    """The environment of the engine process: what the user has, and a bound on OpenMP's spinning unless the user has set one."""
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return dict(os.environ)
    return {**os.environ, "GOMP_SPINCOUNT": OPENMP_SPINS}


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def resolve_parallel(options: ParallelOptions, spec: FamilySpec, device: Literal["cpu", "cuda"]) -> ParallelConfig:
    """Fix how the model is shared. Raises ConfigError, which says what sizes work, where it cannot be."""
    size, cuda = options.tp_size, device == "cuda"
    if obstacles := spec.cuts.obstacles(size):
        sizes = ", ".join(str(n) for n in range(1, LARGEST_TP + 1) if not spec.cuts.obstacles(n))
        raise ConfigError(f"--tp-size {size}: {' and '.join(obstacles)} cannot be divided among {size} ranks; sizes that work are {sizes}")
    narrow = spec.cuts.encoder_width < NARROW_ENCODER * size
    uncut = spec.cuts.encoder_obstacles(size)
    encoder = options.mm_encoder_tp_mode
    if encoder == "auto":
        encoder = "data" if size > 1 and (uncut or narrow) else "weights"
    elif encoder == "weights" and uncut:
        raise ConfigError(
            f"--mm-encoder-tp-mode weights: {' and '.join(uncut)} cannot be divided among {size} ranks; use --mm-encoder-tp-mode data"
        )
    all_reduce = options.all_reduce
    if all_reduce == "auto":
        all_reduce = "nccl" if cuda else "shm" if platform.machine() == "x86_64" else "gloo"
    elif (all_reduce in ("nccl", "symm-mem")) != cuda:
        raise ConfigError(f"--all-reduce {all_reduce} does not work on {device}; {'nccl and symm-mem' if cuda else 'shm and gloo'} do")
    return ParallelConfig(size, encoder, all_reduce, options.step_timeout or (120.0 if cuda else 1200.0))


def resolve(model: ModelOptions, engine: EngineOptions, spec: FamilySpec, dtype: Dtype, hardware: Hardware, ranks: int = 1) -> EngineConfig:
    """Fix every open dial. `dtype` is what the weights were loaded as; `hardware` is what one of `ranks` ranks has.

    Raises ConfigError where a setting cannot work.
    """
    cuda = hardware.device == "cuda"
    context = model.context_length or spec.context_length
    max_running = engine.max_running_requests or (256 if cuda else 32)
    chunk = engine.chunked_prefill_size or (8192 if cuda else 2048)
    fraction = engine.mem_fraction_static or (0.85 if cuda else 0.5)
    if context > spec.context_length:
        raise ConfigError(f"--context-length {context}: the model was made for {spec.context_length} tokens at most")

    page_bytes = kv_page_bytes(spec, engine.page_size, dtype, ranks)
    used = hardware.total_bytes - hardware.free_bytes
    # A GPU is the engine's alone; a CPU's memory is everybody's, and what others hold is not for us to count on.
    budget = int(fraction * hardware.total_bytes) - used if cuda else int(fraction * hardware.free_bytes)
    kv_bytes = min(budget, int(0.9 * hardware.free_bytes))
    # More than every running request at full length would be of use to the prefix cache only.
    enough = engine.max_total_tokens or max_running * context
    kv_pages = min(kv_bytes // page_bytes, 1 + -(-enough // engine.page_size))
    # A request needs no more pages than the longest one; below one context the pool itself is the limit.
    if kv_pages < 2:
        raise ConfigError(
            f"no memory for the KV cache: {used / GIB:.1f} of {hardware.total_bytes / GIB:.1f} GiB are used, and "
            f"--mem-fraction-static {fraction} leaves {max(0, kv_bytes) / GIB:.2f}; raise it, or free memory"
        )
    context = min(context, (kv_pages - 1) * engine.page_size)
    left = hardware.free_bytes - kv_pages * page_bytes
    return EngineConfig(
        device=hardware.device,
        dtype=dtype,
        context_length=context,
        max_running=max_running,
        chunk_tokens=chunk,
        page_size=engine.page_size,
        kv_pages=kv_pages,
        prefix_cache=not engine.disable_radix_cache,
        embeddings=resolve_embeddings(engine, spec, dtype, left, hardware.host_free_bytes),
        encode_patches=engine.max_encode_patches or (65536 if cuda else 16384),
        encoder=resolve_encoder(engine, spec, flash=cuda and dtype != "float32"),
    )


def resolve_encoder(engine: EngineOptions, spec: FamilySpec, *, flash: bool) -> EncoderConfig:
    """`flash`: device and dtype allow flash attention. Raises ConfigError where a setting cannot work."""
    attention = ("flash" if flash else "sdpa") if engine.mm_attention_backend == "auto" else engine.mm_attention_backend
    if attention == "flash" and not flash:
        raise ConfigError("--mm-attention-backend flash: it needs --device cuda and a dtype of 16 bits")
    if attention != "flash" or engine.disable_vit_graph:
        if engine.vit_graph_buckets:
            why = "--disable-vit-graph is set" if engine.disable_vit_graph else "graphs need --device cuda and flash attention"
            raise ConfigError(f"--vit-graph-buckets {engine.vit_graph_buckets[0]}: {why}")
        return EncoderConfig(attention)
    merged = spec.image_rules.merge**2
    wrong = [size for size in engine.vit_graph_buckets if size < 1 or size % merged]
    if wrong:
        raise ConfigError(f"--vit-graph-buckets {wrong[0]}: must be {merged}, the patches of a token, or a multiple of it")
    return EncoderConfig(attention, tuple(sorted(set(engine.vit_graph_buckets))) or VIT_GRAPH_SIZES)


def arena_bytes(media: MediaOptions, spec: FamilySpec) -> int:
    """Bytes of the pixel arena. Raises ConfigError where the model's largest picture, as uint8 RGB, would not fit.

    `max_image_pixels` makes none smaller: it bounds what is sent, and a request's `min_pixels` enlarges that up to the model's bound.
    """
    most = spec.image_rules.max_pixels
    if media.arena_mb * MIB < 3 * most:
        raise ConfigError(
            f"--arena-mb {media.arena_mb}: the model's largest picture takes {3 * most / MIB:.1f} MiB ({most} pixels after resizing); "
            f"set it to {-(-3 * most // MIB)} or more"
        )
    return media.arena_mb * MIB


def resolve_embeddings(engine: EngineOptions, spec: FamilySpec, dtype: Dtype, left: int, host_left: int) -> EmbeddingBudgets:
    """`left`, `host_left`: bytes of device and host that nothing else has claimed. Raises ConfigError."""
    rules = spec.image_rules
    largest = rules.max_pixels // rules.factor**2 * embedding_bytes_per_token(spec, dtype)
    device = max(64 * MIB, left // 10, min(LARGEST_PICTURES * largest, left // 4))
    device = device if engine.embedding_cache_device_mb is None else engine.embedding_cache_device_mb * MIB
    host = host_left // 4 if engine.embedding_cache_host_mb is None else engine.embedding_cache_host_mb * MIB
    if engine.embedding_cache_dir is None or engine.embedding_cache_disk_mb == 0:
        return EmbeddingBudgets(device, host)
    folder = Path(engine.embedding_cache_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except FileExistsError:
        raise ConfigError(f"--embedding-cache-dir {folder}: it is a file, not a folder") from None
    except OSError as error:
        raise ConfigError(f"--embedding-cache-dir {folder}: {error.strerror}") from None
    disk = free // 4 if engine.embedding_cache_disk_mb is None else engine.embedding_cache_disk_mb * MIB
    return EmbeddingBudgets(device, host, disk, str(folder))


def count_saved(config: EngineConfig, engine: EngineOptions, nbytes: int) -> EngineConfig:
    """Add to a derived disk budget its quarter of `nbytes`, which the model's embeddings take there already.

    They are known only once the model is loaded. Without them the budget would shrink at each restart.
    """
    if engine.embedding_cache_disk_mb is not None:
        return config
    return replace(config, embeddings=replace(config.embeddings, disk_bytes=config.embeddings.disk_bytes + nbytes // 4))


def embedding_bytes_per_token(spec: FamilySpec, dtype: Dtype) -> int:
    """Bytes of one token's embedding, deepstack levels included."""
    return spec.embedding_width * (4 if dtype == "float32" else 2)


def kv_page_bytes(spec: FamilySpec, page_size: int, dtype: Dtype, ranks: int = 1) -> int:
    """Bytes of one KV page over all layers, keys and values, on each of `ranks` ranks."""
    layout = spec.kv_layout.on_rank(ranks)
    return layout.layers * 2 * page_size * layout.kv_heads * layout.head_dim * (4 if dtype == "float32" else 2)


def describe(
    config: EngineConfig, parallel: ParallelConfig, spec: FamilySpec, hardware: Hardware, patch_embed: PatchEmbedding, saved: int
) -> tuple[tuple[str, str], ...]:
    """What the engine decided, for people: (name, value). `saved`: embeddings found on disk."""
    kv_bytes = config.kv_pages * kv_page_bytes(spec, config.page_size, config.dtype, parallel.size)
    kv = f"{_count(config.kv_pages - 1, 'page')} of {config.page_size} = {_count(config.kv_tokens, 'token')}, {kv_bytes / MIB:.0f} MiB"
    rules = spec.image_rules
    each = " per rank" if parallel.size > 1 else ""
    folded = ", folded patch embedding" if patch_embed == "folded" else ""
    shared = f"{parallel.size}, sums by {parallel.all_reduce}, vision tower shared by {parallel.encoder}"
    return (
        ("device", f"{config.device} ({hardware.name}), {config.dtype}"),
        *((("ranks", shared),) if parallel.size > 1 else ()),
        ("context", f"{config.context_length} tokens"),
        ("KV cache", kv + each),
        ("prefix cache", "on" if config.prefix_cache else "off"),
        ("batch", f"{_count(config.max_running, 'request')}, {_count(config.chunk_tokens, 'token')} per step"),
        ("vision tower", f"{config.encoder.attention} attention{folded}, {_count(config.encode_patches, 'patch')} per step"),
        *((("vision graphs", ", ".join(map(str, config.encoder.graph_sizes)) + " patches"),) if config.encoder.graph_sizes else ()),
        ("embedding cache", _describe_embeddings(config.embeddings, saved) + each),
        ("resized pictures", f"{rules.min_pixels} to {rules.max_pixels} pixels"),
    )


def describe_intake(media: MediaOptions) -> tuple[tuple[str, str], ...]:
    """The same of what becomes of pictures before the engine sees them."""
    return (("sent pictures", f"{_count(media.max_image_pixels, 'pixel')} at most, decoded by {_count(media.workers, 'process')}"),)


def _describe_embeddings(budgets: EmbeddingBudgets, saved: int) -> str:
    parts = [f"{budgets.device_bytes / MIB:.0f} MiB"]
    if budgets.host_bytes:
        parts.append(f"{budgets.host_bytes / MIB:.0f} MiB on the host")
    if budgets.disk_bytes:
        parts.append(f"{budgets.disk_bytes / MIB:.0f} MiB in {budgets.folder} ({_count(saved, 'picture')} found there)")
    return ", ".join(parts)


def _count(number: int, thing: str) -> str:
    """1 patch, 2 patches."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}es" if thing.endswith(("s", "ch")) else f"{number} {thing}s"
