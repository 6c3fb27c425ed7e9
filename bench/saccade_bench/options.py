"""The options of the tools: each field is one option, the string below the field its help.

Owns names, defaults and checks. Names are those of the serving benchmarks in common use, so that
published commands carry over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.core.tuning import above, at_least, at_most

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
    """The server to ask."""

    base_url: str = "http://127.0.0.1:8000"
    """The server's URL, with or without /v1."""
    host: str | None = None
    """The server's host, in place of --base-url. Derived: 127.0.0.1 if --port is given."""
    port: int | None = None
    """The server's port, in place of --base-url. Derived: 8000 if --host is given."""
    model: str | None = None
    """Model name. Derived: the first model that the server lists."""
    api_key: str | None = None
    """The server's key, sent as Authorization: Bearer KEY."""
    header: tuple[str, ...] = ()
    """More headers, as NAME=VALUE."""
    extra_request_body: str = "{}"
    """JSON object merged into every request body."""
    timeout: float | None = None
    """Maximum seconds per request. Derived: 600, and 120 for probe."""

    @property
    def url(self) -> str:
        """The server's URL, by --base-url or by --host and --port."""
        if self.host is None and self.port is None:
            return self.base_url
        return f"http://{self.host or '127.0.0.1'}:{self.port or 8000}"

    def __post_init__(self) -> None:
        above(0, self, "timeout")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The number and the times of requests."""

    num_prompts: int = 100
    """Number of requests to send, or of chats for multiturn-image and agent."""
    max_concurrency: int | None = None
    """Maximum requests (or chats) in flight. Derived: no limit."""
    request_rate: float = float("inf")
    """Requests (or chats) started per second, at random (Poisson) times. inf: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution for the times between arrivals. 1 is Poisson. Lower values
    make bursts. Higher values space arrivals more evenly.
    """
    warmup_requests: int = 1
    """Requests sent before the clock starts. Their results are dropped. Drawn images and texts are
    never reused, but those from mmmu and custom are.
    """
    seed: int = 1
    """Seed for every image, text and arrival. Images from another seed are new to a server that you
    measured before.
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
    """The lengths of questions and answers."""

    random_input_len: int = 128
    """Text tokens per question. The server counts them before the clock starts.
    """
    random_prefix_len: int = 0
    """Text tokens that all questions begin with, in addition to --random-input-len. Images then
    follow the text, as vLLM's client sends them, so that a prefix cache can share these tokens.
    """
    random_output_len: int = 128
    """Tokens per answer."""
    random_range_ratio: float | None = None
    """Lengths vary uniformly between this share and all of the values above. With --backend
    openai-chat, they vary by up to this share in both directions, as vLLM's client has it. Derived:
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
    """The requests' content."""

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
    """repeat: exact share of images that the server has seen before."""
    zipf: float = 1.0
    """repeat: the r-th image repeats with weight 1/r^zipf. 0: all are equally likely."""
    sessions: int = 0
    """repeat: divide requests among this many growing chats. 0: each request stands alone."""
    tenants: int = 1
    """repeat: divide sessions among this many tenants (`cache_salt`), who share no image."""
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
    """Shares by (height, width, frames). Frames must be 1, because video is refused."""


@dataclass(frozen=True, slots=True)
class PastedOptions:
    """Options of SGLang's and vLLM's clients, so that their command lines run as they are."""

    backend: Backend = "sglang-oai-chat"
    """The other client's name for a server's API. All are asked at /v1/chat/completions."""
    endpoint: Literal["/v1/chat/completions"] = "/v1/chat/completions"
    """The only path that is asked."""
    apply_chat_template: bool = False
    """No effect: the server applies its chat template."""
    ignore_eos: bool = False
    """No effect: this is the default. See --disable-ignore-eos."""
    trust_remote_code: bool = False
    """No effect: the server counts tokens, so that no tokenizer is loaded here."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The printed and the kept output."""

    output_file: Path | None = None
    """Append JSON lines to this file: the run, every request, the summary."""
    label: str | None = None
    """Name of the run in reports. Derived: the model's name."""
    goodput: tuple[str, ...] = ()
    """Limits in ms for a good request, as ttft:500 tpot:50 e2el:3000."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """The latencies to print, divided by commas."""
    trace: bool = False
    """Ask a Saccade server where it found each image. Other servers refuse the field."""
    save_text: bool = False
    """Keep every question and answer in the output file, with each image's digest and size.
    `saccade simulate` replays such files.
    """
    quiet: bool = False
    """Print no progress and no tables."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """The bounds of the climb."""

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
    """Number of questions. Derived: 200, or all for ocrbench and mmmu."""
    concurrency: int = 4
    """Maximum questions in flight."""
    seed: int = 0
    """First seed for drawn questions (ocr, shapes, consistency, video)."""
    dataset_path: str | None = None
    """ocrbench, mmmu: a local file or folder, or a hub id. Derived: the hub's published data
    set.
    """
    max_tokens: int | None = None
    """Maximum answer length in tokens. Derived: 48, or 1024 for mmmu."""
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
    """The first server's command line. {port} stands for a free port."""
    b: str
    """The second server's command line."""
    label_a: str = "A"
    """The first server's name in tables and reports."""
    label_b: str = "B"
    """The second server's name."""
    repeats: int = 3
    """Runs per server, in turns as A B A B A B. Each pair of runs has its own seed."""
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
    """Keep the servers' output here. Derived: dropped unless a server fails to start."""

    def __post_init__(self) -> None:
        at_least(1, self, "repeats", "eval_prompts")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The place of the report."""

    output: Path = Path("report")
    """Folder for report.html and the PNG plots."""
    title: str | None = None
    """The page's title. Derived: the labels."""
    baseline: str | None = None
    """Baseline label for comparisons. Derived: the first label."""


@dataclass(frozen=True, slots=True)
class PublishedOptions:
    """The published commands to run, and the servers."""

    only: tuple[str, ...] = ()
    """Names of rows to run. Derived: all of them."""
    server: str | None = None
    """The command line of a Saccade server, in place of --base-url. {port} stands for a free port.
    Each command then runs on this server, and again on one without the mechanism.
    """
    num_prompts: int | None = None
    """Maximum requests per command. Derived: as many as published."""
    seed: int = 1
    """Seed for every command. Images from another seed are new to a server that you measured
    before.
    """
    quick: bool = False
    """Send few requests with small images, to try the commands out on a CPU."""
    mmmu: str | None = None
    """A local file or folder of MMMU. Derived: the hub's."""
    ocrbench: str | None = None
    """A local file or folder of OCRBench. Derived: the hub's."""
    start_timeout: float = 600.0
    """Maximum seconds until a server answers /v1/models."""
    json: bool = False
    """Print JSON in place of the table."""


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """The images of the questions."""

    cases: tuple[str, ...] = ()
    """Cases to try. Derived: all of them."""
    images: int = 600
    """Images in the case "many". Among 600, two share a 16-bit key with 94 % probability and a
    24-bit key with 1 %.
    """
    host: str = "127.0.0.1"
    """This machine's address, where the server fetches an image in the case "url"."""
    seed: int | None = None
    """Seed for the numbers in the images. Derived: a new seed each time, so that the images are new
    to every server.
    """
    output_file: Path | None = None
    """Write the findings here, as JSON."""

    def __post_init__(self) -> None:
        at_least(1, self, "images")
        at_most(5_000, self, "images")
