"""What the user may set: the command line's options, and the environment.

Each field of `ModelOptions`, `EngineOptions`, `PinOptions`, `ParallelOptions`, `MediaOptions`,
`ServerOptions`, `ObservabilityOptions`, `ResponseOptions`, `ConnectionOptions` and `RoleOptions` is
one option; the string below it is its help; None means "derive it". This is the only module that
reads the environment. It does not know how an open option is decided: that is `engine/sizing.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from saccade.core.bounds import MOST_IMAGE_WORKERS, above, at_least, at_most, named
from saccade.core.claims import Claim
from saccade.core.config import (
    MIB,
    AllReduce,
    Dtype,
    EncoderAttention,
    EncoderMode,
    KVDtype,
    QuantizationMode,
    Role,
)
from saccade.core.errors import ConfigError
from saccade.core.secrets import bare, without_secrets
from saccade.core.store import SHARED, UPLOADS

MOST_RUNNING = 65_536
"""Requests side by side: each has its place in tables that are made at the start."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to serve, and how it is computed."""

    dtype: Literal["auto", Dtype] = "auto"
    """Number format of weights and computation. auto: the checkpoint's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. auto: cuda if there is one."""
    quantization: QuantizationMode = "auto"
    """Matrices of the language model in 8 or 4 bits. auto: as the checkpoint has them, where the
    device can (those of 4 bits on cpu: unless that is float32); others in the number format of
    --dtype. int8, int4 (on cpu): made so at load, and
    rows as they come in 8 bits. int8: half the memory of 16 bits and about 0.6 of the time of a
    decode step, for a little accuracy. int4 (needs the extra cpu): 0.3 and 0.4, for more of it; the
    head stays in 8 bits. none: in the number format of --dtype, whatever the checkpoint has, and
    rows too.
    """
    kv_cache_dtype: KVDtype = "auto"
    """Number format of keys and values. auto: that of --dtype. fp8_e4m3: 8 bits, so that twice as
    many tokens fit as with 16, for a little accuracy; divided by the checkpoint's k_scale and
    v_scale where it has them. On cuda from compute capability 8.9 on; on a cpu it is slower.
    """
    load_format: Literal["auto", "dummy"] = "auto"
    """Where weights come from. auto: the checkpoint. dummy: random weights from config.json
    alone, to measure speed without a checkpoint.
    """
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    chat_template: str | None = None
    """A file with a chat template to use instead of the checkpoint's."""
    special_tokens_in_content: bool = False
    """Names of special tokens inside messages (<|im_end|>) are those tokens. Without this they are
    text: special tokens come from the chat template and /v1/completions only.
    """
    tool_parser: Literal["auto", "hermes", "xml", "none"] = "auto"
    """How the model writes tool calls. hermes: JSON within <tool_call>. xml: <function=NAME> within
    <tool_call>. none: tools are refused. auto: as the chat template shows.
    """
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """How the model writes reasoning. think: within <think>. none: it is part of the answer. auto:
    as the chat template shows.
    """
    context_length: int | None = None
    """Longest prompt plus answer, in tokens. Derived: the model's own limit."""
    family_option: tuple[str, ...] = ()
    """An option of the model's family, NAME=VALUE; repeat the option for several. Qwen-VL:
    patch_embed=folded (normalisation and the second frame of a still image are part of the vision
    tower's first layer: less work, as exact on average, not the same bits).
    """

    disable_cuda_graph: bool = False
    """Do not replay CUDA graphs of the language model."""
    cuda_graph_max_bs: int | None = None
    """Most sequences that decode in a CUDA graph; steps of more run without. Derived (cuda): as
    many as run side by side.
    """
    piecewise_graph_tokens: int | None = None
    """Most tokens of prompts in a step that is a CUDA graph, whole, with what decodes beside them;
    larger steps run without. 0: none is. Derived (cuda): 4096, fewer where memory is short.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "context_length", "cuda_graph_max_bs")
        at_least(0, self, "piecewise_graph_tokens")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine schedules and what it keeps."""

    max_running_requests: int | None = None
    """Requests generated side by side; more wait. Derived: 32 on cpu, 256 on cuda."""
    chunked_prefill_size: int | None = None
    """Tokens computed per step; longer prompts are cut into chunks. Derived: 2048 on cpu, 8192 on
    cuda.
    """
    page_size: int = 16
    """Tokens per KV page; the prefix cache reuses whole pages."""
    mem_fraction_static: float | None = None
    """On cuda: share of the device's memory for weights and KV cache together. On cpu: share of
    what is free that the KV cache may take. Derived: 0.85 on cuda, 0.5 on cpu.
    """
    max_total_tokens: int | None = None
    """Most tokens that the KV cache holds. Derived: as many as memory allows."""
    disable_radix_cache: bool = False
    """Do not reuse the KV of prompts seen before."""
    embedding_cache_device_mb: int | None = None
    """MiB of device memory for image embeddings. Derived: a tenth of what weights and KV cache
    leave free, or room for four of the largest images.
    """
    embedding_cache_host_mb: int | None = None
    """MiB of host memory for image embeddings that the device has no room for. Derived: a quarter
    of the free host memory, 8192 at most, on cuda; 0 on cpu, where device and host are one.
    """
    embedding_cache_disk_mb: int | None = None
    """MiB of disk space for image embeddings, which survive a restart. Derived: a quarter of what
    is free in --embedding-cache-dir or taken by saved embeddings already.
    """
    embedding_cache_dir: str | None = None
    """Folder for image embeddings on disk. Derived: no embedding is kept on disk."""
    max_encode_patches: int | None = None
    """Image patches encoded per step; one image may always be encoded, whatever its size.
    Derived: 16384.
    """
    mm_attention_backend: Literal["auto", EncoderAttention] = "auto"
    """Attention of the vision tower. triton: our own kernel (cuda). flash: torch's variable-length
    flash attention (cuda, 16 bits). cudnn: cuDNN's in graphs, triton without. fa3, fa4: the modules
    flash_attn_interface (Hopper) and flash_attn.cute (cuda), 16 bits. sdpa: one call per image
    size. auto: by the GPU's architecture.
    """
    disable_vit_graph: bool = False
    """Do not replay CUDA graphs of the vision tower."""
    vit_graph_buckets: tuple[int, ...] = ()
    """Patch counts to capture CUDA graphs of the vision tower at; larger packs run without.
    Derived: 11 from 128 to 2048, as larger packs are encoded in parts; with cudnn 23 to 16384.
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
        at_most(MOST_RUNNING, self, "max_running_requests")
        if self.embedding_cache_disk_mb and self.embedding_cache_dir is None:
            raise ConfigError("--embedding-cache-disk-mb: say where, with --embedding-cache-dir")


@dataclass(frozen=True, slots=True)
class PinOptions:
    """What is kept because clients ask for it, and where other servers find it."""

    pinned_share: float = 0.5
    """Share of the KV cache, and of the device's embedding cache, that requests may keep from being
    evicted for a time (prompt_cache_breakpoint, cache_control, prompt_cache_retention). Each client
    has its part; beyond it, its oldest give way. Kept or not, nothing stops a request for lack of
    room. 0: nothing is kept.
    """
    embedding_cache_shared: str | None = None
    """Folder for image embeddings that several servers of one model write and read, instead of
    --embedding-cache-dir: an image that one has encoded, none encodes again while it lasts there.
    On one machine, or a network file system with locks. Derived: none.
    """
    embedding_cache_shared_mb: int | None = None
    """MiB that all of these servers together keep there, of all models; give each server the same.
    Derived: a quarter of what is free in --embedding-cache-shared or taken by saved embeddings
    already.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "embedding_cache_shared_mb")
        if self.embedding_cache_shared is not None:
            check_folder("--embedding-cache-shared", self.embedding_cache_shared, SHARED)
        elif self.embedding_cache_shared_mb is not None:
            raise ConfigError(
                "--embedding-cache-shared-mb: say where, with --embedding-cache-shared"
            )
        at_least(0, self, "pinned_share")
        at_most(1, self, "pinned_share")


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How one model is spread over several processes."""

    tp_size: int = 1
    """Tensor parallelism: processes (on cuda: GPUs) that share one model."""
    mm_encoder_tp_mode: Literal["auto", EncoderMode] = "auto"
    """How the processes of --tp-size share the vision tower. weights: each holds a slice of it.
    data: each holds the whole tower and encodes a part of the images. auto: weights, unless the
    tower does not divide or its slices would be too narrow.
    """
    all_reduce: Literal["auto", AllReduce] = "auto"
    """How the processes of --tp-size add up their partial results. auto: nccl on cuda; on cpu shm
    (memory that the processes share), or gloo where the processor is not x86.
    """
    step_timeout: float | None = None
    """Seconds after which a step of the engine is taken to be stuck, and the server ends.
    Derived: 120 on cuda, 1200 on cpu.
    """
    ep_size: int = 1
    """Expert parallelism: runs of whole experts among which the processes are divided, instead of a
    slice of every expert for each. It may be more than --tp-size: each process then holds a run,
    and of all else the whole, or what other processes hold too. One is a multiple of the other.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "tp_size")
        at_least(1, self, "ep_size")
        if max(self.tp_size, self.ep_size) % min(self.tp_size, self.ep_size):
            raise ConfigError(
                f"--ep-size {self.ep_size}: with --tp-size {self.tp_size}, one must be a multiple "
                "of the other"
            )
        above(0, self, "step_timeout")

    @property
    def ranks(self) -> int:
        """Processes."""
        return max(self.tp_size, self.ep_size)


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Where pictures may come from, and what they may cost."""

    max_image_pixels: int = 178_956_970
    """Largest image, in pixels by its header; a larger one is refused before decoding."""
    max_image_bytes: int = 64 * MIB
    """Largest encoded image, in bytes."""
    max_images_per_request: int = 256
    """Most images in one request."""
    media_workers: int | None = None
    """Processes that decode images. Derived: half the cores, at least 1."""
    arena_mb: int = 512
    """MiB of shared memory for decoded images on their way to the engine; at least one of the
    model's largest must fit. When the memory is full, decoding waits.
    """
    fetch_timeout: float = 10.0
    """Seconds that fetching one image by URL may take in all."""
    decode_timeout: float = 20.0
    """Seconds that decoding one image may take."""
    decode_memory_mb: int = 2560
    """Memory that all image workers together may take to decode. An image that would take more by
    itself is refused: 100 Mpx are 1.1 (JPEG, PNG) to 2.2 GiB (WebP, AVIF).
    """
    allowed_media_domains: tuple[str, ...] = ()
    """Fetch images from this host only; repeat the option for several. Derived: any public host."""
    allow_private_media: bool = False
    """Also fetch images from private, loopback and link-local addresses."""
    allowed_local_media_path: str | None = None
    """Allow file: URLs below this folder."""
    files_dir: str | None = None
    """Folder for files uploaded with /v1/files; several servers may share one. Derived:
    saccade/files in the user's cache folder.
    """
    files_mb: int = 4096
    """MiB of disk for uploaded files; beyond it, uploads are refused until files go or expire."""

    def __post_init__(self) -> None:
        at_least(1, self, "max_image_pixels", "max_image_bytes", "media_workers")
        at_most(MOST_IMAGE_WORKERS, self, "media_workers")
        at_least(0, self, "max_images_per_request", "files_mb")
        above(0, self, "fetch_timeout", "decode_timeout", "decode_memory_mb")
        named(self, "allowed_media_domains")
        allowed = self.allowed_local_media_path
        if allowed is not None and not (allowed and Path(allowed).is_dir()):
            raise ConfigError(f"--allowed-local-media-path {allowed!r} is not a folder")
        if self.files_dir is not None:
            check_folder("--files-dir", self.files_dir, UPLOADS)

    @property
    def decode_memory(self) -> int:
        """Bytes that all image workers together may take to decode."""
        return self.decode_memory_mb * MIB

    @property
    def workers(self) -> int:
        """Processes that decode pictures."""
        return self.media_workers or min(MOST_IMAGE_WORKERS, max(1, usable_cores() // 2))

    @property
    def files_folder(self) -> Path:
        """Where uploaded files are kept."""
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(self.files_dir or f"{cache}/saccade/files").expanduser()


EMPTY_KEY = (
    "--api-key or SACCADE_API_KEY is empty: give a key, or leave both out, and the server asks for "
    "none"
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the HTTP server listens and whom it lets in."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 opens the server to the network: set --api-key then."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    api_key: str | None = None
    """Ask clients for this key (Authorization: Bearer KEY). On a command line it stays in
    /proc/PID/cmdline for all to read: set SACCADE_API_KEY, or name --api-keys-file, instead.
    """
    api_keys_file: str | None = None
    """Ask clients for one of the keys in this file: a line name:key for each; it is read again
    within a second of its change. Where there are several keys, each sees its own files, finds its
    own images cached, and holds at most half of --max-queued-requests and --max-inflight-mb.
    """
    share_cache: bool = False
    """Several keys share what is cached of images and prompts; each still has its own files."""
    served_model_name: tuple[str, ...] = ()
    """Name the API answers to; repeat the option for several. Derived: the model as given on the
    command line.
    """
    cors_origins: tuple[str, ...] = ()
    """Browser origin that may call the API; repeat the option for several."""
    allowed_hosts: tuple[str, ...] = ()
    """Host name that the server also answers to; repeat the option for several. On a loopback
    address and without a key it answers to localhost and loopback addresses only, so that no web
    page can use it.
    """
    max_body_mb: int = 256
    """Largest request body, in MiB."""
    max_inflight_mb: int | None = None
    """MiB of bodies and encoded images held for requests in flight; a request that would exceed
    it is answered 429. Derived: a quarter of memory.
    """
    max_queued_requests: int = 1024
    """Requests in flight, running and waiting; more are answered 429."""
    shutdown_grace: float = 30.0
    """Seconds that running requests get to finish when the server is told to stop."""
    disable_page: bool = False
    """Serve no page at /."""

    def __post_init__(self) -> None:
        at_least(0, self, "port", "shutdown_grace")
        at_least(1, self, "max_body_mb", "max_inflight_mb", "max_queued_requests")
        at_most(65535, self, "port")
        if self.api_key == "":
            raise ConfigError(EMPTY_KEY)
        named(self, "served_model_name", "cors_origins", "allowed_hosts")

    @property
    def key(self) -> str | None:
        """The key that clients must send, if any.

        Raises ConfigError for an empty SACCADE_API_KEY.
        """
        key = self.api_key or os.environ.get("SACCADE_API_KEY")
        if key == "":
            raise ConfigError(EMPTY_KEY)
        return key

    @property
    def asks_for_key(self) -> bool:
        """Whether clients must send one."""
        return self.key is not None or self.api_keys_file is not None

    @property
    def inflight_bytes(self) -> int:
        """Bytes that may be held for requests in flight."""
        return share_of_memory(self.max_inflight_mb)


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """What operators see of requests."""

    metrics_without_key: bool = False
    """Answer /metrics also to those who do not send the key."""
    log_requests: bool = False
    """Log a line for every request: tokens, images, times."""
    log_slow_seconds: float | None = None
    """Log what became of each image of requests that take longer than this."""
    otlp_traces_endpoint: str | None = None
    """Send a trace of every request, with a span for each stage, to this OpenTelemetry collector
    (OTLP over HTTP, protobuf), for example http://127.0.0.1:4318. No text and no image is in it.
    OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS are honoured. Needs the
    extra otel.
    """

    def __post_init__(self) -> None:
        at_least(0, self, "log_slow_seconds")
        if self.otlp_traces_endpoint is not None:
            _ = self.traces_url

    @property
    def traces_url(self) -> str | None:
        """Where traces are sent: the endpoint, with the usual path if it has none.

        Raises ConfigError for what is no http(s) URL.
        """
        given = self.otlp_traces_endpoint
        if given is None:
            return None
        try:
            url = urlsplit(given)
            whole = url.scheme in ("http", "https") and url.hostname and url.port != 0
        except ValueError:  # a port that is no number
            whole = False
        if not whole:
            raise ConfigError(
                f"--otlp-traces-endpoint {given!r}: give a URL such as http://127.0.0.1:4318 (OTLP "
                "over HTTP; 4317 is usually the port for gRPC)"
            )
        return given if url.path.strip("/") else urlunsplit(url._replace(path="/v1/traces"))


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What POST /v1/responses keeps, for previous_response_id and to be asked for again. Where
    there are several keys, each sees its own responses, and has at most half of the room.
    """

    responses_mb: int = 256
    """MiB of memory for responses and their conversations; those used least lately go first. 0
    keeps none.
    """
    max_responses: int = 10_000
    """Responses that are kept at a time."""
    responses_ttl: float = 86_400.0
    """Seconds that a response is kept after its last use."""

    def __post_init__(self) -> None:
        at_least(0, self, "responses_mb", "max_responses", "responses_ttl")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How many connections the HTTP server keeps, and how slow they may be."""

    max_connections: int | None = None
    """Connections open at a time. Beyond it the longest idle one is closed for a new one; when all
    are in use, a new one is answered 429, but for /health. Derived: what the limit of open files
    leaves, at most 4096.
    """
    max_connections_per_address: int | None = None
    """Of these, what one address may have (of IPv6, one /64). Derived: half. A proxy in front is
    one address: give it --max-connections then.
    """
    header_timeout: float = 20.0
    """Seconds for the head of a request, from its first byte or the start of the connection."""
    keep_alive_timeout: float = 75.0
    """Seconds that a connection may be idle after an answer."""
    body_timeout: float = 300.0
    """Seconds for the body of a request; a body must also keep coming (64 KiB in 30 seconds)."""
    write_timeout: float = 30.0
    """Seconds that a client may take nothing of what waits for it; its request is dropped then."""

    def __post_init__(self) -> None:
        at_least(16, self, "max_connections")
        at_least(1, self, "max_connections_per_address")
        above(0, self, "header_timeout", "keep_alive_timeout", "body_timeout", "write_timeout")


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """What this server does of the model, and who does the rest."""

    role: Role = "all"
    """all: everything. encode: only encode images, for servers of role language: no language model
    is loaded. language: have images encoded by --encoders, and by this server itself where that
    fails.
    """
    encoders: tuple[str, ...] = ()
    """The servers of role encode, as http://HOST:PORT,...; an image's digest says which one encodes
    it. Every server of role language must name them alike.
    """
    encoders_file: str | None = None
    """A file with the same, one a line, in place of --encoders: it is read again while the server
    runs, so encoders may come, go and move. Until it names one, images are encoded here.
    """
    encoder_key: str | None = None
    """The encoders' --api-key. Also read from SACCADE_ENCODER_KEY, which keeps it out of process
    lists.
    """
    encoder_timeout: float = 10.0
    """Seconds that an encoder has for an image, from the question to the last byte; after that the
    image is encoded here.
    """
    encoder_connections: int = 16
    """Images that one encoder is asked for at a time; others wait their turn, within the time."""

    def __post_init__(self) -> None:
        above(0, self, "encoder_timeout")
        at_least(1, self, "encoder_connections")
        named(self, "encoders")
        if self.encoders and self.encoders_file is not None:
            raise ConfigError("--encoders and --encoders-file: say who encodes in one of them")
        if (self.role == "language") != bool(self.encoders or self.encoders_file):
            raise ConfigError(
                "--role language goes with --encoders or --encoders-file: say who encodes, or "
                "leave both out"
            )

    @property
    def pool(self) -> tuple[str, ...]:
        """The encoders, one by one."""
        return tuple(part for each in self.encoders for part in each.split(",") if part)

    @property
    def key(self) -> str:
        """What encoders are shown; "" for nothing."""
        return self.encoder_key or os.environ.get("SACCADE_ENCODER_KEY") or ""


def share_of_memory(limit_mb: int | None) -> int:
    """Bytes: what the user says, else a quarter of memory."""
    if limit_mb is not None:
        return limit_mb * MIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


OPENMP_SPINS = "4000"
"""Turns that an OpenMP thread of the engine waits before it sleeps, some tens of microseconds.
Without end, as is the library's choice, threads that share their cores with anything else wait for
each other's time slices: 40 times slower. Not at all, and each operation of a small model waits for
threads to wake: 1.6 times slower where nothing else runs (LOG.md).
"""
ALLOCATION = "expandable_segments:True"
"""Embeddings have sizes of all kinds: in segments of fixed sizes they leave gaps that nothing fits
into.
"""


def check_folder(option: str, name: str, claim: Claim) -> None:
    """Raises ConfigError unless `name` is a folder of ours, or can become one."""
    folder = Path(name).expanduser()
    standing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not name or not standing.is_dir():
        raise ConfigError(f"{option} {name!r}: {standing} is not a folder")
    if standing != folder and not os.access(standing, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {name!r}: nothing can be made in {standing}")
    if standing == folder:
        try:
            claim.check(folder)
        except OSError as error:
            raise ConfigError(f"{option} {name!r}: {error.strerror}") from None


def engine_environment() -> dict[str, str]:
    """The environment of the engine process and its workers: what the user has; a bound on
    OpenMP's spinning, and segments of GPU memory that grow, unless the user has said otherwise; no
    keys.
    """
    environment = without_secrets(os.environ)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = OPENMP_SPINS
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = ALLOCATION
    return environment


def image_environment() -> dict[str, str]:
    """The environment of image workers: one thread each, for they are many, and more would not live
    through a fork.
    """
    return bare(os.environ) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))
