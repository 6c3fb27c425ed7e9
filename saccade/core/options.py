"""The options of `saccade serve`, and the environment.

Each field of a dataclass here is one option, and the string below the field is its help. None means
"derive it". A field made by `tuned` is a tuning value, set by --tune NAME=VALUE. Settings that the
environment holds are read here alone. How an open option is decided stands in `engine/sizing.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit, urlunsplit

from saccade.core.bounds import MOST_IMAGE_WORKERS, above, at_least, at_most, named
from saccade.core.claims import DiskFolder, check_folder
from saccade.core.config import (
    MIB,
    AllReduce,
    Dtype,
    EncoderAttention,
    KVDtype,
    LanguageAttention,
    QuantizationMode,
    Role,
    TowerQuantization,
)
from saccade.core.errors import ConfigError
from saccade.core.given_paths import check_given
from saccade.core.page_store import PAGES
from saccade.core.private_folder import cache_folder
from saccade.core.store import SHARED, UPLOADS
from saccade.core.tuning import basic, tuned

FILES_BYTES = 4 << 30
"""For uploaded files, where no size is given."""
MOST_RUNNING = 65_536
"""Requests side by side: each has its place in tables that are made at the start."""

TOOL_FORMATS = Path(__file__).parents[1] / "text" / "answer" / "formats"
"""A module for each way to write tool calls: listed for its name, imported by `text/` alone."""
if TYPE_CHECKING:
    ToolParser = str
else:
    ToolParser = Literal["auto", *(each.name for each in iter_modules([TOOL_FORMATS])), "none"]
ReasoningParser = Literal["auto", "think", "channel", "none"]
Parity = Literal["auto", "unproven", "generate"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, its number formats, and how it reads and writes text."""

    # formats and device
    dtype: Literal["auto", Dtype] = basic("auto")
    """Number format of weights and computation. auto: the checkpoint's own."""
    device: Literal["auto", "cpu", "cuda"] = basic("auto")
    """Device that the model runs on. auto: cuda if the machine has a GPU."""
    quantization: QuantizationMode = basic("auto")
    """Bits of the language model's matrices. auto: the checkpoint's own bits where the device can
    use them (4 bits on a cpu need another format than float32). Other checkpoints have the number
    format of --dtype. int8 and int4 (on a cpu) quantise the matrices at load and round activations
    to 8 bits. int8 takes half the memory of 16 bits and about 0.6 of the time of a decode step, for
    a little accuracy. int4 needs the extra cpu. It takes 0.3 and 0.5, costs a small model much
    accuracy, and keeps the head in 8 bits. none: keep everything in the number format of --dtype.
    """
    quantization_tower: TowerQuantization = "none"
    """Bits of the vision tower's matrices (on a cpu). int8 quantises them at load and rounds
    activations to 8 bits. That takes half the bytes, for a little accuracy. Wide towers get faster.
    Towers of width 256 do not where a processor has AMX.
    """
    kv_cache_dtype: KVDtype = "auto"
    """Number format of keys and values. auto: that of --dtype. fp8_e4m3: 8 bits, so twice as many
    tokens fit as with 16, for a little accuracy. It uses the checkpoint's k_scale and v_scale if
    there are any. A GPU needs compute capability 8.9. A cpu gets slower.
    """
    # files
    load_format: Literal["auto", "dummy"] = tuned(
        "auto",
        "Weights to load. auto: the checkpoint's. dummy: random ones from config.json alone.",
    )
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    mmproj: str | None = None
    """The *.gguf file with the vision tower of a language model in another *.gguf file. Derived:
    the file with mmproj in its name in the same folder or repository.
    """
    parity: Parity = "auto"
    """What must show that answers are transformers' own. auto: a test compares this architecture's
    (docs/models.md). unproven: no test does, and it is served by transformers' own modules. A few
    prompts are compared at load either way. If they differ, the model is refused. generate: the
    first tokens of a few answers are compared with transformers' own generate before start-up ends,
    whether a test does or not. If they differ, the server ends. The model is in memory twice
    meanwhile. Images are compared only where transformers' own modules serve the model.
    """
    # prompts and answers
    chat_template: str | None = basic(None)
    """A file with a chat template to use instead of the checkpoint's."""
    tool_parser: ToolParser = "auto"
    """The model's way to write tool calls (docs/structured-output.md describes each).
    none: tools are refused. auto: as the chat template shows.
    """
    reasoning_parser: ReasoningParser = "auto"
    """The model's way to write reasoning. think: within think tags. channel: within <|channel>.
    none: reasoning is part of the answer. auto: as the chat template shows.
    """
    # the rest of the model
    context_length: int | None = basic(None)
    """Longest prompt plus answer, in tokens. Derived: the model's own limit."""
    family_option: tuple[str, ...] = ()
    """An option of the model's family, NAME=VALUE. Repeat the option for several. Qwen-VL has
    patch_embed. folded makes normalisation and the second frame of a still image part of the vision
    tower's first layer. That is less work and as exact on average, with other last bits. exact
    keeps the checkpoint's own steps. auto: folded in bfloat16 on CPUs.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "context_length")
        if self.chat_template:
            check_given("--chat-template", self.chat_template)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How many requests and tokens the engine computes at a time, and their memory."""

    # steps
    max_running_requests: int | None = basic(None)
    """Requests generated at a time. More wait. Derived: 32 on cpu, 256 on cuda."""
    chunked_prefill_size: int | None = None
    """Tokens computed per step. Longer prompts are cut into chunks. Derived: 2048 on cpu, 8192 on
    cuda.
    """
    # memory
    page_size: int = tuned(16, "Tokens per KV page. The prefix cache reuses whole pages.")
    mem_fraction_static: float | None = basic(None)
    """On cuda: share of the device's memory for weights and KV cache together. On cpu: share of
    the free memory for the KV cache. Derived: 0.85 on cuda, 0.5 on cpu.
    """
    max_total_tokens: int | None = None
    """Maximum tokens in the KV cache. Derived: as many as memory allows."""
    max_encode_patches: int | None = tuned(
        None, "Image patches encoded per step (16384). One image is always allowed."
    )
    # guesses
    speculative: Literal["auto", "always", "off"] = "auto"
    """Guess next tokens from the prompt, the answer so far and earlier answers about an image, and
    compute the guesses in the same step. auto: only where no guess can change an answer. always:
    also where last bits may differ, and for models with recurrent states (not on cuda).
    """
    # kernels
    attention_backend: Literal["auto", LanguageAttention] = "auto"
    """Attention of the language model. triton: our own kernels (cuda). x86: compiled for the
    processor, in bfloat16 (cpu, needs the extra cpu). sdpa: PyTorch's, a call for each sequence
    (cpu). reference: slow and plain, for comparison (cpu). auto: the first of these that runs.
    """
    mm_attention_backend: Literal["auto", EncoderAttention] = tuned(
        "auto",
        "Attention in the vision tower: triton, flash, fa3, fa4 (on cuda) or sdpa. auto "
        "chooses by the GPU's architecture.",
    )
    # graphs
    disable_cuda_graph: bool = False
    """Run without CUDA graphs, in the language model and in the vision tower."""
    # CPUs
    threads: int | None = None
    """CPU threads of the engine. Derived: the cores this process may use."""

    def __post_init__(self) -> None:
        positive = (
            "max_running_requests",
            "chunked_prefill_size",
            "page_size",
            "max_total_tokens",
        )
        at_least(1, self, *positive, "max_encode_patches", "threads")
        above(0, self, "mem_fraction_static")
        at_most(0.98, self, "mem_fraction_static")
        at_most(MOST_RUNNING, self, "max_running_requests")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The prompt and image caches: how large, how long, and where."""

    disable_radix_cache: bool = tuned(False, "Disable the reuse of KV from earlier prompts.")
    prepare_next: bool = tuned(
        True, "Compute an agent's next prompt while idle, once it is known how the agent trims."
    )
    embedding_cache_device_mb: int | None = basic(None)
    """MiB of device memory for image embeddings. Derived: a tenth of the memory that weights and KV
    cache leave free, or room for four of the largest images.
    """
    embedding_cache_host_mb: int | None = tuned(
        None,
        "MiB of host memory for image embeddings that exceed the device's space. Derived: a "
        "quarter of free memory on cuda, at most 8192. On a cpu it is 0.",
    )
    embedding_cache_dir: str | None = basic(None)
    """Folder for image embeddings on disk, which survive a restart, as FOLDER or FOLDER:SIZE
    (/var/cache/images:64GiB). Without a size they take a quarter of the space there that is free or
    taken by them. Derived: embeddings stay in memory.
    """
    embedding_cache_shared: bool = False
    """Share --embedding-cache-dir with other servers of the same model, so that each image is
    encoded once for all of them. Give each server the same FOLDER:SIZE, which they fill together.
    The folder is on one machine, or on a network file system with locks.
    """
    kv_cache_dir: str | None = basic(None)
    """Folder for the KV of prompts that leave memory, by eviction or at the end of the server, as
    FOLDER or FOLDER:SIZE. It is read instead of computed, also after a restart. It holds what users
    have sent, as numbers (mode 0700). Without a size it takes a quarter of the space there that is
    free or taken by saved pages. Derived: KV stays in memory.
    """
    kv_cache_host_mb: int | None = tuned(
        None,
        "MiB of each rank's host memory for KV that leaves the device. Derived: a tenth of free "
        "memory on a GPU. On a CPU it is 0, because KV is already in host memory.",
    )

    @property
    def prepares_next(self) -> bool:
        """Return True if next prompts are computed ahead."""
        return self.prepare_next and not self.disable_radix_cache

    def __post_init__(self) -> None:
        sizes = "embedding_cache_device_mb", "embedding_cache_host_mb"
        at_least(0, self, *sizes, "kv_cache_host_mb")
        if (pages := self.kv_disk) is not None:
            check_folder("--kv-cache-dir", pages.path, PAGES)
            if pages.nbytes == 0:
                raise ConfigError(
                    f"--kv-cache-dir {self.kv_cache_dir}: give it room, or leave it out"
                )
        if (embeddings := self.embedding_disk) is not None:
            if not embeddings.path:
                raise ConfigError("--embedding-cache-dir: name a folder")
            check_folder("--embedding-cache-dir", embeddings.path, SHARED)
        elif self.embedding_cache_shared:
            raise ConfigError("--embedding-cache-shared: say where, with --embedding-cache-dir")

    @property
    def embedding_disk(self) -> DiskFolder | None:
        """Return the folder for embeddings, if any."""
        given = self.embedding_cache_dir
        return None if given is None else DiskFolder.parse("--embedding-cache-dir", given)

    @property
    def kv_disk(self) -> DiskFolder | None:
        """Return the folder for KV pages, if any."""
        given = self.kv_cache_dir
        return None if given is None else DiskFolder.parse("--kv-cache-dir", given)


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """The processes that share one model."""

    tp_size: int = basic(1)
    """Tensor parallelism: processes (on cuda: GPUs) that share one model."""
    ep_size: int = 1
    """Expert parallelism: processes among which whole experts are divided, in place of a slice of
    every expert for each. --ep-size may exceed --tp-size. Several processes then hold the same
    slice of everything else. One of the two is a multiple of the other.
    """
    all_reduce: Literal["auto", AllReduce] = tuned(
        "auto",
        "How processes add up results: nccl or symm-mem on cuda, shm or gloo on cpu. auto: nccl on "
        "cuda, shm on x86, else gloo.",
    )
    step_timeout: float | None = tuned(
        None, "Seconds until a step counts as stuck and the server ends (cuda 120, cpu 1200)."
    )

    def __post_init__(self) -> None:
        at_least(1, self, "tp_size", "ep_size")
        if max(self.tp_size, self.ep_size) % min(self.tp_size, self.ep_size):
            raise ConfigError(
                f"--ep-size {self.ep_size}: with --tp-size {self.tp_size}, one must be a multiple "
                "of the other"
            )
        above(0, self, "step_timeout")

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        return max(self.tp_size, self.ep_size)


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Image sources, uploaded files, and the bounds for both."""

    # bounds of an image, and of a request
    max_image_pixels: int = 178_956_970
    """Largest image, in pixels by its header. A larger one is refused before decoding."""
    max_image_bytes: int = tuned(64 * MIB, "Maximum size of an encoded image, in bytes.")
    max_images_per_request: int = 256
    """Maximum images in one request."""
    # who decodes, and where to
    media_workers: int | None = None
    """Processes that decode images. Derived: half the cores, at least 1."""
    arena_mb: int = tuned(
        512,
        "MiB of shared memory for decoded images before they reach the engine. It holds at least "
        "the model's largest image.",
    )
    max_pages: int = tuned(
        200, "Maximum pages of a PDF that a request shows. It may choose them from a longer file."
    )
    # clocks and memory
    fetch_timeout: float = tuned(
        10.0,
        "Maximum seconds to fetch one image by URL, including redirects, or its embedding from an "
        "encoder. This server encodes what an encoder does not send in time.",
    )
    decode_timeout: float = tuned(20.0, "Maximum seconds to decode one image.")
    decode_memory_mb: int = tuned(
        2560,
        "MiB of memory for decoding, shared by all image workers. The server refuses an image that "
        "needs more.",
    )
    # what is fetched
    allowed_media_domains: tuple[str, ...] = ()
    """Fetch images from this host only. Repeat the option for several. Derived: any public host."""
    allow_private_media: bool = False
    """Also fetch images from private, loopback and link-local addresses."""
    allowed_local_media_path: str | None = None
    """Allow file: URLs below this folder."""
    # uploads
    files_dir: str | None = None
    """Folder for files uploaded with /v1/files, as FOLDER, FOLDER:SIZE or :SIZE. Several servers
    may share one. Once 4GiB, or the size, are used up, uploads are refused until files are deleted
    or expire. Derived: saccade/files in the user's cache folder.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "max_image_pixels", "max_image_bytes", "media_workers", "max_pages")
        at_most(MOST_IMAGE_WORKERS, self, "media_workers")
        at_least(0, self, "max_images_per_request")
        above(0, self, "fetch_timeout", "decode_timeout", "decode_memory_mb")
        named(self, "allowed_media_domains")
        allowed = self.allowed_local_media_path
        if allowed is not None:
            check_given("--allowed-local-media-path", allowed, folder=True)
        files = self.files_disk
        if self.files_dir is not None and (files.path or files.nbytes is None):
            check_folder("--files-dir", files.path, UPLOADS)

    @property
    def decode_memory(self) -> int:
        """Return the bytes for decoding, over all image workers."""
        return self.decode_memory_mb * MIB

    @property
    def workers(self) -> int:
        """Return the number of processes that decode images."""
        return self.media_workers or min(MOST_IMAGE_WORKERS, max(1, usable_cores() // 2))

    @property
    def files_disk(self) -> DiskFolder:
        """Return the folder for uploaded files as given, "" for the user's cache folder."""
        return DiskFolder.parse("--files-dir", self.files_dir or "")

    @property
    def files_folder(self) -> Path:
        """Return the folder for uploaded files."""
        given = self.files_disk.path
        return Path(given).expanduser() if given else cache_folder("files")

    @property
    def files_bytes(self) -> int:
        """Return the bytes of disk for uploaded files."""
        nbytes = self.files_disk.nbytes
        return FILES_BYTES if nbytes is None else nbytes


EMPTY_KEY = (
    "--api-key or SACCADE_API_KEY is empty: give a key, or leave both out, and the server asks for "
    "none"
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The HTTP server's address, its clients, and its limits."""

    host: str = basic("127.0.0.1")
    """Address to listen on. 0.0.0.0 opens the server to the network. Set SACCADE_API_KEY then."""
    port: int = basic(8000)
    """Port to listen on. 0 picks a free port."""
    api_key: str | None = basic(None)
    """Ask clients for this key (Authorization: Bearer KEY). A key on a command line stays in
    /proc/PID/cmdline for all to read. Use SACCADE_API_KEY instead, or --api-keys-file.
    """
    api_keys_file: str | None = None
    """Ask clients for one of the keys in this file, a line name:key for each. The file is read
    again within a second of its change. Each key sees its own files, finds its own images cached,
    and holds at most half of --max-queued-requests and --max-inflight-mb.
    """
    share_cache: bool = False
    """Let several keys share cached images and prompts. Each key still has its own files."""
    served_model_name: tuple[str, ...] = basic(())
    """Name of the model in the API. Repeat the option for several. Derived: the model as given on
    the command line.
    """
    cors_origins: tuple[str, ...] = ()
    """Browser origin that may call the API. Repeat the option for several."""
    allowed_hosts: tuple[str, ...] = ()
    """Host name that the server also answers to. Repeat the option for several. Without a key and
    on a loopback address it answers to localhost and loopback addresses only, so that foreign web
    pages cannot use it.
    """
    max_body_mb: int = 256
    """Largest request body, in MiB."""
    max_inflight_mb: int | None = None
    """MiB of bodies and encoded images held for requests in flight. A request beyond this limit is
    answered 429. Derived: a quarter of memory.
    """
    max_queued_requests: int = 1024
    """Requests in flight, running and waiting. More are answered 429."""
    disable_page: bool = False
    """Turn off the page at /."""

    def __post_init__(self) -> None:
        at_least(0, self, "port")
        at_least(1, self, "max_body_mb", "max_inflight_mb", "max_queued_requests")
        at_most(65535, self, "port")
        if self.api_key == "":
            raise ConfigError(EMPTY_KEY)
        named(self, "served_model_name", "cors_origins", "allowed_hosts")
        if self.api_keys_file is not None:
            check_given("--api-keys-file", self.api_keys_file)

    @property
    def key(self) -> str | None:
        """Return the key that clients must send, or None. Raises ConfigError if SACCADE_API_KEY is
        empty.
        """
        key = self.api_key or os.environ.get("SACCADE_API_KEY")
        if key == "":
            raise ConfigError(EMPTY_KEY)
        return key

    @property
    def asks_for_key(self) -> bool:
        """Return True if clients must send a key."""
        return self.key is not None or self.api_keys_file is not None

    @property
    def inflight_bytes(self) -> int:
        """Return the byte limit for bodies and encoded images in flight."""
        return share_of_memory(self.max_inflight_mb)


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The responses that POST /v1/responses keeps, for previous_response_id and GET, and its tools.

    With several keys, each key sees its own responses and fills at most half the budget.
    """

    refuse_unsupported_tools: bool = tuned(
        False,
        "Answer 400 if a request of POST /v1/responses offers tools that this server does not run, "
        "such as web_search. By default these are left out, and the response lists them.",
    )
    responses_mb: int = tuned(
        256,
        "MiB of memory for responses and their conversations. The least recently used are dropped "
        "first. With 0, the server keeps none.",
    )

    def __post_init__(self) -> None:
        at_least(0, self, "responses_mb")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The HTTP server's connections: how many, how slow, and their end."""

    max_connections: int | None = tuned(
        None,
        "Maximum open connections (as the limit for open files allows, at most 4096). Beyond that, "
        "a new connection replaces the longest idle one. If none is idle, it is answered 429.",
    )
    max_connections_per_address: int | None = tuned(
        None,
        "Maximum connections per address (half of max_connections). An IPv6 /64 counts as one "
        "address, and so does a proxy.",
    )
    shutdown_grace: float = 30.0
    """Seconds that running requests get to finish when the server is told to stop."""
    header_timeout: float = tuned(
        20.0,
        "Maximum seconds for a request's head, from its first byte or the connection's start.",
    )
    keep_alive_timeout: float = tuned(75.0, "Seconds until the server closes an idle connection.")
    body_timeout: float = tuned(
        300.0,
        "Maximum seconds for a request's body. It must also bring 64 KiB every 30 seconds.",
    )
    write_timeout: float = tuned(
        30.0, "Seconds until the server drops the request of a client that reads nothing."
    )

    def __post_init__(self) -> None:
        at_least(16, self, "max_connections")
        at_least(1, self, "max_connections_per_address")
        at_least(0, self, "shutdown_grace")
        above(0, self, "header_timeout", "keep_alive_timeout", "body_timeout", "write_timeout")


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """Which part of the model this server runs, and the servers that run the rest."""

    role: Role = "all"
    """all: serve everything. encode: only encode images, for servers of role language, and load no
    language model. language: have images encoded by --encoders, or by this server if they fail.
    """
    encoders: tuple[str, ...] = ()
    """The servers of role encode, as http://HOST:PORT,..., or a file of such lines. An image's
    digest picks one of them, so every server of role language must name them alike. A file is read
    again while the server runs, so encoders may come, go and move. While it is empty, this server
    encodes.
    """
    encoder_key: str | None = None
    """The encoders' --api-key. SACCADE_ENCODER_KEY has the same meaning and keeps the key out of
    process lists.
    """

    def __post_init__(self) -> None:
        named(self, "encoders")
        for path in self._files:
            if len(self.encoders) > 1:
                raise ConfigError(f"--encoders {path}: name one file, or URLs")
            check_given("--encoders", path)
            if "/" not in path and not Path(path).exists():
                raise ConfigError(f"--encoders {path}: give http://HOST:PORT, or a file (./NAME)")
        if (self.role == "language") != bool(self.encoders):
            raise ConfigError(
                "--role language goes with --encoders: say who encodes, or leave both out"
            )

    @property
    def _files(self) -> tuple[str, ...]:
        return tuple(each for each in self.encoders if "://" not in each)

    @property
    def encoders_file(self) -> Path | None:
        """Return the file that names the encoders, or None."""
        return Path(self._files[0]) if self._files else None

    @property
    def pool(self) -> tuple[str, ...]:
        """Return the encoders' URLs, empty if a file names them."""
        urls = (each for each in self.encoders if "://" in each)
        return tuple(part for each in urls for part in each.split(",") if part)

    @property
    def key(self) -> str:
        """Return the key for encoders, or "" without one."""
        return self.encoder_key or os.environ.get("SACCADE_ENCODER_KEY") or ""


Pooling = Literal["auto", "last", "embed", "rank", "none"]
"""As `AnswerOptions.pooling`."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Answer settings that requests leave open, and adapters that requests choose."""

    default_max_tokens: int | None = basic(None)
    """Maximum length of an answer whose request sets none (completions: 16, as in OpenAI's API).
    Derived: max_new_tokens of the checkpoint's generation_config.json, else the rest of the
    context.
    """

    pooling: Pooling = "auto"
    """How embeddings and ranks are computed. auto: as the checkpoint's files say
    (Qwen3-VL-Embedding, Qwen3-VL-Reranker). embed, rank: as these models do, if the files do not
    say. last: embed by the last state of a chat model. It was not trained for that, so embeddings
    are not calibrated. none: turn both off.
    """
    lora: tuple[str, ...] = ()
    """An adapter as PEFT writes it (LoRA), NAME=FOLDER. Repeat the option for several. Requests
    choose one by the field model. POST /v1/load_lora_adapter loads more.
    """
    max_loras: int = tuned(16, "Maximum loaded adapters. 0 refuses all adapters.")

    def __post_init__(self) -> None:
        at_least(1, self, "default_max_tokens")
        at_least(0, self, "max_loras")
        named(self, "lora")


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """Metrics, logs and request traces."""

    metrics_without_key: bool = False
    """Answer /metrics to clients without the key, too."""
    log_requests: bool = tuned(False, "Log one line per request with its tokens, images and times.")
    log_slow_seconds: float | None = tuned(
        None, "Log each image's trace for requests that take more seconds than this (off)."
    )
    otlp_traces_endpoint: str | None = None
    """Send a trace of every request, with a span for each stage, to this OpenTelemetry collector
    (OTLP over HTTP, protobuf), for example http://127.0.0.1:4318. A trace holds no text and no
    image. OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS are honoured. This
    option needs the extra otel.
    """

    def __post_init__(self) -> None:
        at_least(0, self, "log_slow_seconds")
        if self.otlp_traces_endpoint is not None:
            _ = self.traces_url

    @property
    def traces_url(self) -> str | None:
        """Return the collector's endpoint, with the usual path if the given URL lacks one.

        Raises ConfigError unless the endpoint is an http(s) URL.
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
class ServeOptions:
    """`LLM` is told the first six: what a model needs without HTTP."""

    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    caches: CacheOptions = field(default_factory=CacheOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    edge: ConnectionOptions = field(default_factory=ConnectionOptions)
    kept: ResponseOptions = field(default_factory=ResponseOptions)
    watch: ObservabilityOptions = field(default_factory=ObservabilityOptions)
    role: RoleOptions = field(default_factory=RoleOptions)


def share_of_memory(limit_mb: int | None) -> int:
    """Return `limit_mb` MiB in bytes, or a quarter of memory for None."""
    if limit_mb is not None:
        return limit_mb * MIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def usable_cores() -> int:
    """Count the cores available to this process."""
    return len(os.sched_getaffinity(0))
