"""The core's options of `saccade serve`, and their environment variables. Plugins add their own.

Each field of a dataclass in this module is an option, and the string below the field is its help.
If the default is None, `engine/sizing.py` derives a value at start-up. Fields made by `tuned` are
tuning values, set with --tune NAME=VALUE. No other module reads these environment variables.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from saccade.core.config import (
    MIB,
    Dtype,
    Role,
)
from saccade.core.errors import ConfigError
from saccade.core.given_paths import check_given
from saccade.core.settings import (
    CudaSettings,
    DraftSettings,
    EngineSettings,
    KeySettings,
    ParallelSettings,
    QuantizationSettings,
    RoleSettings,
    SharedOptions,
    SwitchSettings,
    TierSettings,
)
from saccade.core.tuning import MAX_IMAGE_WORKERS, above, at_least, at_most, basic, named, tuned

MAX_RUNNING = 65_536
"""Maximum concurrent requests, because each takes space in tables allocated at start-up."""

ReasoningParser = Literal["auto", "think", "channel", "none"]
Group = TypeVar("Group")
"""A dataclass of options."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, its data types, and its prompt and response formats."""

    # formats and device
    dtype: Literal["auto", Dtype] = basic("auto")
    """Data type of weights and computation. auto: the checkpoint's own."""
    device: Literal["auto", "cpu", "cuda"] = basic("auto")
    """Device that the model runs on. auto: cuda if there is a GPU."""
    # files
    load_format: Literal["auto", "dummy"] = tuned(
        "auto",
        "Weights to load. auto: the checkpoint's. dummy: random ones from config.json alone.",
    )
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    # prompts and responses
    chat_template: str | None = basic(None)
    """A file with a chat template to use instead of the checkpoint's."""
    tool_parser: str = "auto"
    """Tool-call format (see docs/structured-output.md). none: reject tools. auto: detect it in the
    chat template.
    """
    reasoning_parser: ReasoningParser = "auto"
    """Reasoning format. think: within think tags. channel: within <|channel>. none: reasoning is
    part of the answer. auto: detect it in the chat template.
    """
    # length and family
    context_length: int | None = basic(None)
    """Maximum length of prompt and answer together, in tokens. Default: the model's own limit."""
    family_option: tuple[str, ...] = ()
    """An option of the model's family, NAME=VALUE. Repeat the option for several. Qwen-VL has
    patch_embed: folded (faster), exact, or auto, which is folded in bfloat16 on CPUs.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "context_length")
        if self.chat_template:
            check_given("--chat-template", self.chat_template)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How many requests and tokens the engine processes at a time, and their memory."""

    # steps
    max_running_requests: int | None = basic(None)
    """Maximum requests that run at a time. Others wait. Default: 32 on cpu, 256 on cuda."""
    chunked_prefill_size: int | None = None
    """Maximum tokens per step. Longer prompts are split into chunks. Default: 2048 on cpu, 8192 on
    cuda. While others' answers are generated on cuda, a step has as many as fit into 25 ms.
    """
    # memory
    page_size: int = tuned(16, "Tokens per KV page. The prefix cache reuses whole pages.")
    mem_fraction_static: float | None = basic(None)
    """On cuda: fraction of the device's memory for weights and KV cache together. On cpu: fraction
    of free memory for the KV cache. Default: 0.85 on cuda, 0.5 on cpu.
    """
    max_total_tokens: int | None = None
    """Maximum tokens in the KV cache. Default: as many as memory allows."""
    max_encode_patches: int | None = tuned(
        None, "Image patches encoded per step (16384). One image is always allowed."
    )
    # kernels
    attention_backend: str = "auto"
    """Attention of the language model. triton: Saccade's kernels (cuda). x86: JIT-compiled (cpu,
    bfloat16, extra cpu). sdpa: PyTorch's (cpu). reference: slow (cpu). auto: the first that is
    supported.
    """
    # CPUs
    threads: int | None = None
    """CPU threads of the engine. Default: the cores this process may use."""

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
        at_most(MAX_RUNNING, self, "max_running_requests")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The sizes of the prompt and image caches."""

    disable_radix_cache: bool = tuned(False, "Disable the reuse of KV from earlier prompts.")
    embedding_cache_device_mb: int | None = basic(None)
    """MiB of device memory for image embeddings. Default: a tenth of the memory that weights and KV
    cache leave free, or space for four of the largest images.
    """

    def __post_init__(self) -> None:
        at_least(0, self, "embedding_cache_device_mb")


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Limits on images, and the processes that decode them."""

    # limits on an image, and on a request
    max_image_pixels: int = 178_956_970
    """Maximum image size in pixels, by its header. Larger images are rejected before decoding."""
    max_image_bytes: int = tuned(64 * MIB, "Maximum size of an encoded image, in bytes.")
    max_images_per_request: int = 256
    """Maximum images in one request."""
    # image workers, and the memory for their results
    media_workers: int | None = None
    """Processes that decode images. Default: half the cores, at least 1."""
    arena_mb: int = tuned(
        512,
        "MiB of shared memory for decoded images before they reach the engine. It holds at least "
        "the model's largest image.",
    )
    # timeouts and memory
    decode_timeout: float = tuned(20.0, "Maximum seconds to decode one image.")
    decode_memory_mb: int = tuned(
        2560,
        "MiB of memory for decoding, shared by all image workers. Images that need more are "
        "rejected. An eighth more is reserved for small images beside other clients' large ones.",
    )

    def __post_init__(self) -> None:
        at_least(1, self, "max_image_pixels", "max_image_bytes", "media_workers")
        at_most(MAX_IMAGE_WORKERS, self, "media_workers")
        at_least(0, self, "max_images_per_request")
        above(0, self, "decode_timeout", "decode_memory_mb")

    @property
    def decode_memory(self) -> int:
        """Total memory for decoding images, in bytes."""
        return self.decode_memory_mb * MIB

    @property
    def workers(self) -> int:
        """The number of processes that decode images."""
        return self.media_workers or min(MAX_IMAGE_WORKERS, max(1, usable_cores() // 2))


EMPTY_KEY = "--api-key or SACCADE_API_KEY is empty: set a key, or omit both to require none"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The HTTP server's address, its clients, and its limits."""

    host: str = basic("127.0.0.1")
    """Address to listen on. 0.0.0.0 opens the server to the network: set SACCADE_API_KEY, too."""
    port: int = basic(8000)
    """Port to listen on. 0 picks a free port."""
    api_key: str | None = basic(None)
    """Require this key from clients (Authorization: Bearer KEY). Other users can read command lines
    in /proc/PID/cmdline: prefer SACCADE_API_KEY or --api-keys-file.
    """
    served_model_name: tuple[str, ...] = basic(())
    """Name of the model in the API. Repeat the option for several. Default: the MODEL argument on
    the command line.
    """
    cors_origins: tuple[str, ...] = ()
    """Browser origin that is allowed to call the API. Repeat the option for several."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional host name to accept. Repeat the option for several. Without a key, a server on a
    loopback address only accepts localhost and loopback addresses, so that web pages cannot use it.
    """
    max_body_mb: int = 256
    """Maximum request body, in MiB."""
    max_inflight_mb: int | None = None
    """Maximum MiB of bodies and encoded images buffered for requests in flight. Requests beyond it
    get a 429. Default: a quarter of memory.
    """
    max_queued_requests: int = 1024
    """Maximum requests in flight, running and waiting. Others get a 429."""
    metrics_without_key: bool = False
    """Serve /metrics without a key."""

    def __post_init__(self) -> None:
        at_least(0, self, "port")
        at_least(1, self, "max_body_mb", "max_inflight_mb", "max_queued_requests")
        at_most(65535, self, "port")
        if self.api_key == "":
            raise ConfigError(EMPTY_KEY)
        named(self, "served_model_name", "cors_origins", "allowed_hosts")

    @property
    def key(self) -> str | None:
        """The key that clients must send. Raises ConfigError if SACCADE_API_KEY is empty."""
        key = self.api_key or os.environ.get("SACCADE_API_KEY")
        if key == "":
            raise ConfigError(EMPTY_KEY)
        return key

    @property
    def inflight_bytes(self) -> int:
        """Maximum bytes of bodies and encoded images buffered for requests in flight."""
        return share_of_memory(self.max_inflight_mb)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Limits and timeouts of HTTP connections."""

    max_connections: int | None = tuned(
        None,
        "Maximum open connections (as the limit for open files allows, at most 4096). Beyond that, "
        "a new connection replaces the longest idle one. If none is idle, it gets a 429.",
    )
    max_connections_per_address: int | None = tuned(
        None,
        "Maximum connections per address (half of max_connections). An IPv6 /64 counts as one "
        "address, and so does a proxy.",
    )
    shutdown_grace: float = 30.0
    """Seconds that requests in flight get to finish on shutdown."""
    header_timeout: float = tuned(
        20.0,
        "Maximum seconds to receive a request's headers, from its first byte or the start of the "
        "connection.",
    )
    keep_alive_timeout: float = tuned(75.0, "Seconds until the server closes an idle connection.")
    body_timeout: float = tuned(
        300.0,
        "Maximum seconds for a request's body. At least 64 KiB must arrive every 30 seconds.",
    )
    write_timeout: float = tuned(
        30.0,
        "Seconds until the server cancels the request of a client that does not read its response.",
    )

    def __post_init__(self) -> None:
        at_least(16, self, "max_connections")
        at_least(1, self, "max_connections_per_address")
        at_least(0, self, "shutdown_grace")
        above(0, self, "header_timeout", "keep_alive_timeout", "body_timeout", "write_timeout")


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Defaults for response settings that requests omit."""

    default_max_tokens: int | None = basic(None)
    """Maximum length of an answer if the request sets none (completions: 16, as in OpenAI's API).
    Default: max_new_tokens of the checkpoint's generation_config.json, else the rest of the
    context.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "default_max_tokens")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options. `LLM` uses the first five groups, as the next two configure HTTP."""

    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    caches: CacheOptions = field(default_factory=CacheOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    edge: ConnectionOptions = field(default_factory=ConnectionOptions)
    extras: tuple[object, ...] = ()  # one dataclass per plugin with options (`Plugin.options`)

    def of(self, kind: type[Group]) -> Group:
        """Return the options of one plugin, or their defaults if none were set.

        kind: the plugin's dataclass, or the base class of it in `core/settings.py`.
        """
        return next((each for each in self.extras if isinstance(each, kind)), None) or kind()

    @property
    def role(self) -> Role:
        """The part of the model that this server runs."""
        return self.of(RoleSettings).role

    @property
    def asks_for_key(self) -> bool:
        """True if clients must send a key."""
        return self.server.key is not None or self.of(KeySettings).api_keys_file is not None

    @property
    def engine_settings(self) -> EngineSettings:
        """Those options of plugins that the engine reads."""
        return EngineSettings(
            self.of(ParallelSettings),
            self.of(TierSettings),
            self.of(DraftSettings),
            self.of(CudaSettings),
            self.of(QuantizationSettings),
            self.of(SwitchSettings),
        )

    def read_environment(self) -> ServeOptions:
        """Return a copy of the options in which API keys are read from environment variables."""
        server = replace(self.server, api_key=self.server.key)
        extras = tuple(
            each.read_environment() if isinstance(each, SharedOptions) else each
            for each in self.extras
        )
        return replace(self, server=server, extras=extras)


def share_of_memory(limit_mb: int | None) -> int:
    """Convert `limit_mb` from MiB to bytes. If it is None, return a quarter of the host's memory,
    in bytes.
    """
    if limit_mb is not None:
        return limit_mb * MIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def usable_cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0))
