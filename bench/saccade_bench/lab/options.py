"""Options of the lab's commands, in a module without torch so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.core.config import Dtype, QuantizationMode
from saccade.core.errors import ConfigError
from saccade.core.tuning import above, at_least, at_most, option
from saccade_bench.options import Format, ImageContent

PresetName = Literal[
    "internvl3-1b",
    "internvl3-2b",
    "internvl3-8b",
    "qwen2.5-vl-3b",
    "qwen2.5-vl-7b",
    "qwen3-vl-2b",
    "qwen3-vl-4b",
    "qwen3-vl-8b",
    "qwen3-vl-30b-a3b",
    "qwen3-vl-235b-a22b",
    "qwen3.5-2b",
    "qwen3.5-9b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "small-qwen2.5-vl",
    "small-qwen3-vl",
    "small-qwen3.5",
    "wide-qwen3.5",
    "small-qwen3-vl-moe",
    "cut-qwen3-vl-30b-a3b",
    "tiny-qwen2-vl",
    "tiny-qwen2.5-vl",
    "tiny-qwen3-vl",
    "tiny-qwen3.5",
    "tiny-qwen3.5-moe",
    "tiny-qwen3-vl-moe",
    "tiny-internvl",
    "step3-vl-10b",
    "cut-step3-vl-10b",
    "smolvlm-256m",
    "smolvlm2-2.2b",
    "idefics3-8b",
    "minicpm-v-4.6",
    "deepseek-vl2-tiny",
    "deepseek-vl2-small",
    "deepseek-vl2",
    "hunyuan-ocr",
    "dots-ocr",
    "kimi-vl-a3b",
]


@dataclass(frozen=True, slots=True)
class MediaBenchOptions:
    """The images, and the output."""

    resolutions: tuple[str, ...] = ("1280x720", "1920x1080", "2560x1440")
    """Image sizes: WIDTHxHEIGHT, or 720p, 1080p, 1440p, 4k."""
    image_formats: tuple[Format, ...] = ("jpeg", "png")
    """File formats (jpeg and webp at quality 85)."""
    image_contents: tuple[ImageContent, ...] = ("photo", "random")
    """What images show. photo: real photographs, cropped and mixed. random: noise. document:
    rendered text. blank: one flat colour.
    """
    model: str = "demo"
    """Use the image processor's settings of this folder, hub id, or "demo" (those of Qwen3-VL)."""
    repeats: int = 5
    """Runs per measurement, alternating with the baseline. Results are medians."""
    seed: int = 1
    """Seed for the images."""
    output_file: Path | None = None
    """Write every figure here, as JSON."""
    quiet: bool = False
    """Print no progress and no tables."""

    def __post_init__(self) -> None:
        for name in ("resolutions", "image_formats", "image_contents"):
            if not getattr(self, name):
                raise ConfigError(f"{option(name)}: name at least one")
        at_least(1, self, "repeats")


@dataclass(frozen=True, slots=True)
class LimitsOptions:
    """The model and its work."""

    model: Path
    """A folder with a dense Qwen-VL checkpoint, as make-checkpoint writes it."""
    dtype: Dtype = "bfloat16"
    """Data type of weights that are not quantized."""
    quantization: QuantizationMode = "int8"
    """As for saccade serve."""
    image: tuple[int, int] = (704, 1280)
    """Height and width of the image, which must be multiples of the merged patch size."""
    prompt_tokens: int = 2000
    """Tokens of the prompt."""
    rows: tuple[int, ...] = (1, 8)
    """Batch sizes for decode."""
    decoded: int = 128
    """Tokens per sequence."""
    repeats: int = 5
    """Runs of vision encoder and prompt. The fastest counts."""
    threads: int = 1
    """CPU threads."""


ProfileName = Literal["cpu", "h200"]
TraceName = Literal["zipf", "chat", "agent"]
Routing = Literal["affinity", "random", "round-robin"]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The simulated requests, unless a measured run is replayed."""

    # the source
    trace: TraceName = "zipf"
    """zipf: single questions about popular pictures. chat: rounds with the whole history resent.
    agent: a trail of screenshots.
    """
    num_prompts: int = 1000
    """Number of requests. For chats and trails, every round counts."""
    # images
    pictures: int = 1000
    """Different popular images per tenant."""
    zipf: float = 1.0
    """The n-th most popular image appears n ** -this times as often as the first."""
    repeat_ratio: float = 0.9
    """Fraction of images from the popular ones. For agent, fraction of images that show the same
    screen again. All other images are new.
    """
    image_count: int = 1
    """Images per request, or per round in a chat."""
    image_resolution: str = "random:224x224-2560x1440"
    """WIDTHxHEIGHT, random:AxB-CxD (a size per image), or 720p, 1080p, 1440p, 4k."""
    # chats
    rounds: int = 8
    """chat, agent: questions per chat."""
    keep_images: int = 5
    """agent: resend the images from this many last rounds. 0: all."""
    # who asks, and when
    tenants: int = 1
    """Number of tenants. They share nothing with each other."""
    rate: float = 5.0
    """Requests that arrive per second, over all replicas. Chats arrive at this rate divided by
    their rounds. inf: all at once.
    """
    think_time: float = 2.0
    """chat, agent: mean seconds between an answer and the next question."""
    # lengths
    input_len: int = 100
    """Tokens per question."""
    output_len: int = 64
    """Tokens per answer."""
    seed: int = 1
    """Seed for all random values."""

    def __post_init__(self) -> None:
        at_least(1, self, "num_prompts", "pictures", "rounds", "tenants", "input_len", "output_len")
        at_least(0, self, "image_count", "keep_images", "zipf", "repeat_ratio", "think_time")
        at_most(1, self, "repeat_ratio")
        above(0, self, "rate")


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """The simulated machine."""

    # costs
    profile: ProfileName = "cpu"
    """cpu: the demo model on two cores. h200: Qwen3-VL-8B on an H200, from published results."""
    model: str | None = None
    """Use the sizes of this folder or "demo". A measured run also uses its tokenizer. Default: the
    profile's sizes and the demo model's tokenizer.
    """
    constants: Path | None = None
    """A JSON object with costs to use instead of the profile's."""
    # memory
    kv_tokens: int | None = None
    """Capacity of the KV cache in tokens. Default: the profile's value."""
    page_size: int = 16
    """Tokens per KV page."""
    chunked_prefill_size: int | None = None
    """Tokens computed per step. Default: 2048 on cpu, 8192 on h200."""
    embedding_cache_device_mb: int | None = None
    """MiB of device memory for embeddings. Default: 1024 on cpu, 2048 on h200."""
    embedding_cache_host_mb: int | None = None
    """MiB of host memory for embeddings. Default: 0 on cpu, 32768 on h200."""
    embedding_cache_disk_mb: int = 0
    """MiB of disk space for embeddings."""
    kv_cache_host_mb: int = 0
    """MiB of host memory for KV offloaded from the device."""
    kv_cache_disk_mb: int = 0
    """MiB of disk space for KV offloaded from the device."""
    disable_radix_cache: bool = False
    """Disable the reuse of KV from earlier prompts."""

    def __post_init__(self) -> None:
        at_least(1, self, "page_size", "kv_tokens", "chunked_prefill_size")
        at_least(
            0,
            self,
            "embedding_cache_device_mb",
            "embedding_cache_host_mb",
            "embedding_cache_disk_mb",
            "kv_cache_host_mb",
            "kv_cache_disk_mb",
        )


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The simulated fleet."""

    replicas: int = 1
    """Number of servers."""
    workers: tuple[str, ...] = ()
    """The servers' names, as in `saccade route --workers`. The ranking depends on them. Default:
    generated names for --replicas servers.
    """
    routing: tuple[Routing, ...] = ()
    """How requests are routed. If you pass several policies, they are compared. affinity and random
    rank servers as `saccade route` does with --affinity image and none. Default: affinity and
    random if there are several servers.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "replicas")
        if self.workers and self.replicas not in (1, len(self.workers)):
            raise ConfigError(
                f"--replicas {self.replicas}: --workers names {len(self.workers)}; leave it out"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The servers' names."""
        made_up = (f"http://replica-{number}:8000" for number in range(self.replicas))
        return self.workers or tuple(made_up)


@dataclass(frozen=True, slots=True)
class SimulateOutput:
    """The output of a simulation."""

    check: bool = False
    """Compare hits and TTFT with the measured run, round by round. The command fails if a count of
    cached tokens differs.
    """
    output_file: Path | None = None
    """Write everything here, as JSON."""
    quiet: bool = False
    """Print no progress and no tables."""
