"""The options of the tools: each field is one option, the string below the field its help.

Owns names, defaults and checks. Names are those of the serving benchmarks in common use, so that
published commands carry over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.core.bounds import above, at_least, at_most

ImageContent = Literal["random", "photo", "document", "blank", "moving"]
Format = Literal["jpeg", "png", "webp"]

EvalName = Literal["ocr", "shapes", "ocrbench", "mmmu", "consistency", "video"]
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
    """The server, with or without /v1."""
    model: str | None = None
    """Model name. Derived: the first that the server names."""
    api_key: str | None = None
    """Sent as Authorization: Bearer KEY."""
    header: tuple[str, ...] = ()
    """More headers, as NAME=VALUE."""
    extra_request_body: str = "{}"
    """JSON object merged into every request body."""
    timeout: float | None = None
    """Seconds that one request may take. Derived: 600; for probe 120."""

    def __post_init__(self) -> None:
        above(0, self, "timeout")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The number and the times of requests."""

    num_prompts: int = 100
    """Requests to send; for chats (multiturn-image, agent), chats to hold."""
    max_concurrency: int | None = None
    """Requests (for chats: chats) in flight at most. Derived: no limit."""
    request_rate: float = float("inf")
    """Requests (chats) begun per second, at random (Poisson) times; inf: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between arrivals. 1: Poisson; below: bursts;
    above: evener.
    """
    warmup_requests: int = 1
    """Requests sent and forgotten before the clock starts; drawn pictures and texts never come
    again (those of mmmu and custom do).
    """
    seed: int = 1
    """Decides every picture, text and arrival. Pictures of another seed are new to a server that
    has been measured before.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "num_prompts", "max_concurrency")
        at_least(0, self, "warmup_requests")
        above(0, self, "request_rate", "burstiness")


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """The images."""

    image_count: int = 1
    """Pictures per request; for chats, new pictures per round; for clips, seconds per round (of two
    frames, a pair).
    """
    image_resolution: str = "1280x720"
    """WIDTHxHEIGHT, 360p, 480p, 720p, 1080p, 1440p, 4k, or random:AxB-CxD."""
    image_format: Format = "jpeg"
    """File format of the pictures (jpeg and webp at quality 85)."""
    image_content: ImageContent = "random"
    """random: noise; photo: real photographs, cropped and mixed; document: rendered text; blank:
    one flat colour each; moving: discs and a number. Clips are always moving.
    """

    def __post_init__(self) -> None:
        at_least(0, self, "image_count")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The lengths of questions and answers."""

    random_input_len: int = 128
    """Text tokens of each question, by the server's own count (measured before the clock starts).
    """
    random_output_len: int = 128
    """Tokens of each answer."""
    random_range_ratio: float = 1.0
    """Lengths are uniform between this share of the above and the above. 1: always the same."""
    disable_ignore_eos: bool = False
    """Let answers end early. Otherwise `ignore_eos` is sent, so that every answer has its full
    length.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "random_input_len", "random_output_len")
        at_least(0, self, "random_range_ratio")
        at_most(1, self, "random_range_ratio")


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """The requests' content."""

    # what is asked about
    dataset_name: DatasetName = "image"
    """image: new pictures every time. random-mm: sizes and counts from buckets. multiturn-image:
    chats that resend their pictures. repeat: a known share of repeated pictures. agent: a growing
    trail of screenshots. text-beside-images: long answers to text while new images come in;
    --random-output-len must outlast the images. mmmu, custom: from a file. ocr: text to read.
    video: rounds of questions about a clip, each on its own.
    """
    dataset_path: str | None = None
    """mmmu: a local file or folder, or a hub id (default MMMU/MMMU). custom: JSON lines, each with
    `messages`.
    """
    # clips
    video_turns: VideoTurns = "growing"
    """video: each round sends a clip that has grown, the same clip again, or one that overlaps (as
    frames: a window that moves on; as a file: one file at 2 and at 1 frames a second).
    """
    video_form: VideoForm = "frames"
    """video: a clip is sent as a list of frames, as a file (mp4; needs PyAV here), or, to a server
    without videos, as an image for each frame.
    """
    # chats
    rounds: int = 8
    """multiturn-image, agent, video: questions per chat."""
    think_time: float = 0.0
    """Seconds between an answer and the next question of its chat (exponential, this mean)."""
    keep_images: int = 0
    """agent: send only the last so many screenshots again. 0: all."""
    # repeats
    repeat_ratio: float = 0.5
    """repeat: share of pictures that came before, exactly."""
    zipf: float = 1.0
    """repeat: the r-th picture comes again with weight 1/r^zipf. 0: all alike."""
    sessions: int = 0
    """repeat: deal the requests to so many growing chats. 0: each stands alone."""
    tenants: int = 1
    """repeat: deal the sessions to so many tenants (`cache_salt`), who share no image."""
    # text beside
    text_streams: int = 4
    """text-beside-images: answers to text that are streamed side by side."""
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
    """Pictures per request, before the range below."""
    random_mm_num_mm_items_range_ratio: float = 0.0
    """Pictures per request are uniform in base * (1 - this) to base * (1 + this)."""
    random_mm_limit_mm_per_prompt: int = 255
    """Never more pictures than this."""
    random_mm_bucket_config: str = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
    """Shares by (height, width, frames). Frames other than 1 (video) are refused."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The printed and the kept output."""

    output_file: Path | None = None
    """Append the run to this file, as JSON lines: the run, every request, the summary."""
    label: str | None = None
    """Name of what is measured, for reports. Derived: the model's name."""
    goodput: tuple[str, ...] = ()
    """Bounds in ms that a good request keeps, as ttft:500 tpot:50 e2el:3000."""
    trace: bool = False
    """Ask a Saccade server where each picture was found (other servers refuse the field)."""
    save_text: bool = False
    """Keep every question (pictures by digest and size) and answer in the output file; `saccade
    simulate` replays such files.
    """
    quiet: bool = False
    """Print no progress and no tables."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """The bounds of the climb."""

    resolutions: tuple[str, ...] = ("720p", "1080p", "1440p")
    """Picture sizes to probe, one after another."""
    max_images: int = 64
    """Most pictures in one request."""
    step: int = 1
    """Pictures added from one request to the next."""
    image_content: ImageContent = "photo"
    """What the pictures show: random (noise), photo, document, blank."""
    image_format: Format = "jpeg"
    """File format of the pictures."""
    max_tokens: int = 1
    """Tokens of each answer."""
    seed: int = 1
    """Decides the pictures."""
    output_file: Path | None = None
    """Write every request here, as JSON lines."""
    plot: Path | None = None
    """Write a PNG of TTFT by pictures here."""
    quiet: bool = False
    """Print no table."""

    def __post_init__(self) -> None:
        at_least(1, self, "max_images", "step", "max_tokens")


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The questions."""

    num_prompts: int | None = None
    """Questions to ask. Derived: 200; of ocrbench and mmmu all."""
    concurrency: int = 4
    """Questions in flight."""
    seed: int = 0
    """First seed of drawn questions (ocr, shapes, consistency, video)."""
    dataset_path: str | None = None
    """ocrbench, mmmu: a local file or folder, or a hub id. Derived: the published data set on the
    hub.
    """
    max_tokens: int | None = None
    """Longest answer. Derived: 48; for mmmu 1024."""
    output_file: Path | None = None
    """Every answer, as JSON lines. If the file exists, questions answered in it are not asked
    again.
    """
    quiet: bool = False
    """Print no progress and no table."""

    def __post_init__(self) -> None:
        at_least(1, self, "num_prompts", "concurrency", "max_tokens")


@dataclass(frozen=True, slots=True)
class AbOptions:
    """The two servers, and the number of runs."""

    a: str
    """Command line of the first server; {port} stands for a free port."""
    b: str
    """Command line of the second server."""
    label_a: str = "A"
    """Name of the first in tables and reports."""
    label_b: str = "B"
    """Name of the second."""
    repeats: int = 3
    """Runs of each, in turns: A B A B A B. Each has its own seed, the same for both."""
    keep_running: bool = False
    """Start both servers once and keep them, instead of a fresh start for every run. Needs memory
    for both.
    """
    eval: Literal["ocr", "shapes", "none"] = "ocr"
    """Questions that are asked of both, once, to compare accuracy."""
    eval_prompts: int = 100
    """How many."""
    start_timeout: float = 600.0
    """Seconds that a server may take to answer /v1/models."""
    log_dir: Path | None = None
    """Keep the servers' own output here. Derived: thrown away unless a server fails to start."""

    def __post_init__(self) -> None:
        at_least(1, self, "repeats", "eval_prompts")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The place of the report."""

    output: Path = Path("report")
    """Folder for report.html and the plots as PNGs."""
    title: str | None = None
    """Title of the page. Derived: the labels."""
    baseline: str | None = None
    """Label that the others are compared with. Derived: the first."""


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """The images of the questions."""

    cases: tuple[str, ...] = ()
    """Cases to try. Derived: all of them."""
    images: int = 600
    """Images of the case "many". Among 600, two share a key of 16 bits with a probability of 94 %,
    and one of 24 bits with 1 %.
    """
    host: str = "127.0.0.1"
    """Address of this machine under which the server may fetch an image, for the case "url"."""
    seed: int | None = None
    """Decides the numbers that are shown. Derived: another one each time, so that a server that has
    been tried before has seen none of the images.
    """
    output_file: Path | None = None
    """Write what was found here, as JSON."""

    def __post_init__(self) -> None:
        at_least(1, self, "images")
        at_most(5_000, self, "images")
