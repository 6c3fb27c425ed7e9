"""Options of the lab's commands, so that `--help` needs no torch. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.core.config import Dtype
from saccade.core.errors import ConfigError
from saccade.tools.options import Content, Format

PresetName = Literal[
    "qwen2.5-vl-3b",
    "qwen2.5-vl-7b",
    "qwen3-vl-2b",
    "qwen3-vl-4b",
    "qwen3-vl-8b",
    "small-qwen2.5-vl",
    "small-qwen3-vl",
    "tiny-qwen2-vl",
    "tiny-qwen2.5-vl",
    "tiny-qwen3-vl",
]


@dataclass(frozen=True, slots=True)
class MediaBenchOptions:
    """Which pictures, and where the figures go."""

    resolutions: tuple[str, ...] = ("1280x720", "1920x1080", "2560x1440")
    """Picture sizes: WIDTHxHEIGHT, or 720p, 1080p, 1440p, 4k."""
    image_formats: tuple[Format, ...] = ("jpeg", "png")
    """File formats (jpeg and webp at quality 85)."""
    image_contents: tuple[Content, ...] = ("photo", "random")
    """photo: real photographs, cropped and mixed; random: noise; document: rendered text; blank: one flat colour."""
    model: Path | None = None
    """Folder of a Qwen-VL checkpoint, for its image processor's settings. Derived: the demo model's (those of Qwen3-VL)."""
    repeats: int = 5
    """Runs of each measurement, in turns; figures are medians."""
    seed: int = 1
    """Decides the pictures."""
    output_file: Path | None = None
    """Write every figure here, as JSON."""
    plot: Path | None = None
    """Write a bar chart here, as PNG."""
    quiet: bool = False
    """Print no progress and no tables."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats}: must be at least 1")


@dataclass(frozen=True, slots=True)
class EncoderBenchOptions:
    """What to encode, and where the figures go."""

    models: tuple[str, ...] = ("small-qwen2.5-vl", "small-qwen3-vl")
    """Presets of make-checkpoint, or folders with a checkpoint's configuration. Weights are random in any case."""
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    """Number formats to measure."""
    resolutions: tuple[str, ...] = ()
    """Picture sizes, WIDTHxHEIGHT, measured one picture at a time and `batch` at a time. Derived: a mix of 16 sizes only."""
    batch: int = 4
    """Pictures of one size encoded together."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where. auto: cuda if there is one."""
    repeats: int = 5
    """Runs of each measurement, in turns; figures are medians."""
    threads: int | None = None
    """CPU threads. Derived: torch's own choice."""
    without_transformers: bool = False
    """Measure Saccade alone."""
    output_file: Path | None = None
    """Write every figure here, as JSON."""

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.batch < 1:
            raise ConfigError(f"--repeats {self.repeats}, --batch {self.batch}: must be at least 1")


@dataclass(frozen=True, slots=True)
class KernelBenchOptions:
    """What to measure, and where the figures go."""

    models: tuple[str, ...] = ("qwen2.5-vl-7b", "qwen3-vl-8b")
    """Presets of make-checkpoint, whose towers' sizes the measurements have. Only the embedding of positions is made of weights."""
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    """Number formats of queries and keys."""
    tokens: int | None = None
    """Tokens turned by the rotary embedding at a time. Derived: 4096 on cpu, 65536 on cuda."""
    resolutions: tuple[str, ...] = ("1280x720", "1920x1080", "2560x1440")
    """Picture sizes, WIDTHxHEIGHT, whose positions are computed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where. auto: cuda if there is one."""
    repeats: int = 10
    """Runs of each measurement, in turns; figures are medians."""
    threads: int | None = None
    """CPU threads. Derived: torch's own choice."""
    without_transformers: bool = False
    """Measure Saccade alone."""
    output_file: Path | None = None
    """Write every figure here, as JSON."""

    def __post_init__(self) -> None:
        if self.repeats < 1 or (self.tokens is not None and self.tokens < 1):
            raise ConfigError(f"--repeats {self.repeats}, --tokens {self.tokens}: must be at least 1")
