"""The options of the commands. Each field is an option, and the string below it is its help.

Names are those of common serving benchmarks, so that published commands can be reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.core.tuning import above, at_least, at_most
from saccade_bench.prove.options import ProveOptions as ProveOptions

ImageContent = Literal["random", "photo", "document", "blank", "moving"]
Format = Literal["jpeg", "png", "webp"]

EvalName = Literal["ocr", "shapes", "ocrbench", "mmmu", "consistency", "video"]
Backend = Literal["openai-chat", "sglang", "sglang-oai-chat", "vllm", "vllm-chat", "lmdeploy-chat"]
DatasetName = Literal[
    "image",
    "random-mm",
    "multiturn-image",
    "repeat",
    "agent",
    "text-beside-images",
    "mmmu",
    "custom",
    "ocr",
    "video",
]
VideoTurns = Literal["growing", "repeated", "overlapping"]
VideoForm = Literal["frames", "file", "images"]


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The server to measure."""

    base_url: str = "http://127.0.0.1:8000"
    """The server's URL, with or without /v1."""
    host: str | None = None
    """The server's host, instead of --base-url. Default: 127.0.0.1 if --port is given."""
    port: int | None = None
    """The server's port, instead of --base-url. Default: 8000 if --host is given."""
    model: str | None = None
    """Model name. Default: the first model that the server lists."""
    api_key: str | None = None
    """The server's API key, sent as Authorization: Bearer KEY."""
    header: tuple[str, ...] = ()
    """Additional headers, as NAME=VALUE."""
    extra_request_body: str = "{}"
    """JSON object merged into every request body."""
    timeout: float | None = None
    """Maximum seconds per request. Default: 600, and 120 for probe."""

    @property
    def url(self) -> str:
        """The server's URL, from --base-url or from --host and --port."""
        if self.host is None and self.port is None:
            return self.base_url
        return f"http://{self.host or '127.0.0.1'}:{self.port or 8000}"

    def __post_init__(self) -> None:
        above(0, self, "timeout")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Number and timing of requests."""

    num_prompts: int = 100
    """Number of requests to send, or of chats for multiturn-image and agent."""
    max_concurrency: int | None = None
    """Maximum requests (or chats) in flight. Default: no limit."""
    request_rate: float = float("inf")
    """Requests (or chats) started per second, at random (Poisson) times. inf: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution for the times between arrivals. 1 is Poisson. Lower values
    make bursts. Higher values space arrivals more evenly.
    """
    warmup_requests: int = 1
    """Requests sent before the clock starts. Their results are dropped. The measured requests use
    other images and texts, except with mmmu and custom.
    """
    seed: int = 1
    """Seed for every image, text and arrival time. To measure a server again with images that it
    has not cached, use another seed.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "num_prompts", "max_concurrency")
        at_least(0, self, "warmup_requests")
        above(0, self, "request_rate", "burstiness")


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """The images."""

    image_count: int = 1
    """Images per request. For chats, this counts new images per round. For clips, it counts seconds
    per round. Each second has a pair of frames.
    """
    image_resolution: str = "1280x720"
    """WIDTHxHEIGHT, 360p, 480p, 720p, 1080p, 1440p, 4k, or random:AxB-CxD."""
    image_format: Format = "jpeg"
    """File format of the images (jpeg and webp at quality 85)."""
    image_content: ImageContent = "random"
    """What images show. random: noise. photo: real photographs, cropped and mixed. document:
    rendered text. blank: one flat colour each. moving: discs and a number. Clips are always moving.
    """

    def __post_init__(self) -> None:
        at_least(0, self, "image_count")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Lengths of questions and answers."""

    random_input_len: int = 128
    """Text tokens per question. The server counts them before the clock starts.
    """
    random_prefix_len: int = 0
    """Text tokens with which all questions begin, in addition to --random-input-len. Images then
    follow the text, as in vLLM's client, so that a prefix cache can share these tokens.
    """
    random_output_len: int = 128
    """Tokens per answer."""
    random_range_ratio: float | None = None
    """Lengths vary uniformly between this fraction and 1 times the values above. With --backend
    openai-chat, they vary by up to this fraction in both directions, as in vLLM's client. Default:
    constant lengths.
    """
    disable_ignore_eos: bool = False
    """Let answers end early. By default, requests send `ignore_eos` so that every answer has its
    full length.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "random_input_len", "random_output_len")
        at_least(0, self, "random_range_ratio", "random_prefix_len")
        at_most(1, self, "random_range_ratio")


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Content of the requests."""

    # what is asked about
    dataset_name: DatasetName = "image"
    """image: new images every time. random-mm: sizes and counts from buckets. multiturn-image:
    chats that resend their images. repeat: a known share of repeated images. agent: a growing
    trail of screenshots. text-beside-images: long answers to text while new images arrive. Here,
    --random-output-len must outlast the images. mmmu, custom: from a file. ocr: text to read.
    video: rounds of questions about a clip, each in its own request.
    """
    dataset_path: str | None = None
    """mmmu: a local file or folder, or a hub id (default MMMU/MMMU). custom: a file with JSON
    lines, each with `messages`.
    """
    # clips
    video_turns: VideoTurns = "growing"
    """video: each round sends a longer clip, the same clip again, or an overlapping one. For
    frames, a moving window overlaps. For files, one file is read at 2 and at 1 frames per second.
    """
    video_form: VideoForm = "frames"
    """video: sends a clip as a list of frames, as an mp4 file, or as one image per frame. A file
    needs PyAV on this machine. Images suit a server without videos.
    """
    # chats
    rounds: int = 8
    """multiturn-image, agent, video: questions per chat."""
    think_time: float = 0.0
    """Mean seconds between an answer and the chat's next question (exponential)."""
    keep_images: int = 0
    """agent: resend only this many of the latest screenshots. 0: all."""
    # repeats
    repeat_ratio: float = 0.5
    """repeat: exact fraction of images that were already sent."""
    zipf: float = 1.0
    """repeat: the r-th image repeats with weight 1/r^zipf. 0: all are equally likely."""
    sessions: int = 0
    """repeat: divide requests among this many growing chats. 0: each request is independent."""
    tenants: int = 1
    """repeat: divide sessions among this many tenants (`cache_salt`), which share no image."""
    # text beside
    text_streams: int = 4
    """text-beside-images: number of text answers streamed at the same time."""
    image_every: float = 1.0
    """text-beside-images: seconds from one new image to the next."""

    def __post_init__(self) -> None:
        at_least(1, self, "rounds", "tenants", "text_streams")
        above(0, self, "image_every")
        at_least(0, self, "repeat_ratio")
        at_most(1, self, "repeat_ratio")


@dataclass(frozen=True, slots=True)
class RandomMM:
    """Buckets of the data set random-mm."""

    random_mm_base_items_per_request: int = 1
    """Images per request, before the range below applies."""
    random_mm_num_mm_items_range_ratio: float = 0.0
    """Images per request vary uniformly from base * (1 - this) to base * (1 + this)."""
    random_mm_limit_mm_per_prompt: str = "255"
    """Maximum images per request, as a number or in JSON: {"image": 1, "video": 0}."""
    random_mm_bucket_config: str = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
    """Fractions by (height, width, frames). Frames must be 1, because video is not supported."""


@dataclass(frozen=True, slots=True)
class PastedOptions:
    """Options of SGLang's and vLLM's clients, so that their command lines work unchanged."""

    backend: Backend = "sglang-oai-chat"
    """The other client's name for a server's API. All use /v1/chat/completions."""
    endpoint: Literal["/v1/chat/completions"] = "/v1/chat/completions"
    """The only supported path."""
    apply_chat_template: bool = False
    """No effect: the server applies its chat template."""
    ignore_eos: bool = False
    """No effect: this is the default. See --disable-ignore-eos."""
    trust_remote_code: bool = False
    """No effect: the server counts tokens, so that no tokenizer is loaded here."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Printed and saved output."""

    output_file: Path | None = None
    """Append JSON lines to this file: the run, every request, the summary."""
    label: str | None = None
    """Name of the run in reports. Default: the model's name."""
    goodput: tuple[str, ...] = ()
    """Latency limits in ms for a request to count as good, such as ttft:500 tpot:50 e2el:3000."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """The latencies to print, separated by commas."""
    trace: bool = False
    """Request the cache tier of each image from a Saccade server. Other servers may reject the
    field.
    """
    save_text: bool = False
    """Save every question and answer in the output file, with each image's digest and size.
    `saccade simulate` replays such files.
    """
    quiet: bool = False
    """Print no progress and no tables."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Range of requests to try."""

    resolutions: tuple[str, ...] = ("720p", "1080p", "1440p")
    """Image sizes to probe, one after another."""
    max_images: int = 64
    """Maximum images in one request."""
    step: int = 1
    """Images added from one request to the next."""
    image_content: ImageContent = "photo"
    """What images show: random (noise), photo, document, blank."""
    image_format: Format = "jpeg"
    """The images' file format."""
    max_tokens: int = 1
    """Tokens per answer."""
    seed: int = 1
    """Seed for the images."""
    output_file: Path | None = None
    """Write every request here, as JSON lines."""
    plot: Path | None = None
    """Write a PNG with TTFT by number of images here."""
    quiet: bool = False
    """Print no table."""

    def __post_init__(self) -> None:
        at_least(1, self, "max_images", "step", "max_tokens")


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The questions."""

    num_prompts: int | None = None
    """Number of questions. Default: 200, or all for ocrbench and mmmu."""
    concurrency: int = 4
    """Maximum questions in flight."""
    seed: int = 0
    """First seed for drawn questions (ocr, shapes, consistency, video)."""
    dataset_path: str | None = None
    """ocrbench, mmmu: a local file or folder, or a hub id. Default: the hub's published data
    set.
    """
    max_tokens: int | None = None
    """Maximum answer length in tokens. Default: 48, or 1024 for mmmu."""
    output_file: Path | None = None
    """Write every answer here, as JSON lines. If the file exists, the run skips questions that it
    already answers.
    """
    quiet: bool = False
    """Print no progress and no table."""

    def __post_init__(self) -> None:
        at_least(1, self, "num_prompts", "concurrency", "max_tokens")


@dataclass(frozen=True, slots=True)
class AbOptions:
    """The two servers, and the number of runs."""

    a: str
    """The first server's command line. {port} is replaced by a free port."""
    b: str
    """The second server's command line."""
    label_a: str = "A"
    """The first server's name in tables and reports."""
    label_b: str = "B"
    """The second server's name."""
    repeats: int = 3
    """Runs per server, alternating as A B A B A B. Each pair of runs has its own seed."""
    keep_running: bool = False
    """Start both servers once and keep them, instead of a fresh start for every run. Both must fit
    in memory.
    """
    eval: Literal["ocr", "shapes", "none"] = "ocr"
    """Questions that both servers get once, to compare accuracy."""
    eval_prompts: int = 100
    """Number of these questions."""
    start_timeout: float = 600.0
    """Maximum seconds until a server answers /v1/models."""
    log_dir: Path | None = None
    """Save the servers' output here. By default, it is only shown if a server fails to start."""

    def __post_init__(self) -> None:
        at_least(1, self, "repeats", "eval_prompts")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Location and title of the report."""

    output: Path = Path("report")
    """Folder for report.html and the PNG plots."""
    title: str | None = None
    """The page's title. Default: the labels."""
    baseline: str | None = None
    """Baseline label for comparisons. Default: the first label."""


@dataclass(frozen=True, slots=True)
class PublishedOptions:
    """The published commands to run, and the servers."""

    only: tuple[str, ...] = ()
    """Names of rows to run. Default: all of them."""
    server: str | None = None
    """The command line of a Saccade server, instead of --base-url. {port} is replaced by a free
    port. Each command runs on this server, and again on one without the measured mechanism.
    """
    num_prompts: int | None = None
    """Maximum requests per command. Default: as many as published."""
    seed: int = 1
    """Seed for every command. To measure a server again with images that it has not cached, use
    another seed.
    """
    quick: bool = False
    """Send few requests with small images, to try the commands out on a CPU."""
    mmmu: str | None = None
    """A local file or folder of MMMU. Default: the hub's."""
    ocrbench: str | None = None
    """A local file or folder of OCRBench. Default: the hub's."""
    start_timeout: float = 600.0
    """Maximum seconds until a server answers /v1/models."""
    json: bool = False
    """Print JSON instead of the table."""
