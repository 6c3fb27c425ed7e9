"""Figures of `bench media`, by case and stage."""

from __future__ import annotations

from dataclasses import dataclass

from saccade_bench.options import Format, ImageContent

OUR_STAGES = ("base64", "digest", "header", "decode", "resize", "hand-over", "patches")
USUAL_STAGES = ("base64", "decode", "processor", "sha256", "pickle")


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of picture."""

    width: int
    height: int
    format: Format
    content: ImageContent


@dataclass(frozen=True, slots=True)
class Sample:
    """The cost of one kind of image: `ms` of CPU, and `nbytes` into a stage; for a whole path, the
    bytes shipped to the engine.
    """

    ms: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class MediaFigure:
    """One case.

    Our `stages` are those of a new image; "hand-over" is the remainder of the whole.
    """

    case: Case
    stages: dict[str, Sample]
    new: Sample
    seen: Sample
    usual_stages: dict[str, Sample]
    usual: Sample

    @property
    def gain_new(self) -> float:
        """CPU time of the usual way relative to ours."""
        return self.usual.ms / self.new.ms

    @property
    def gain_seen(self) -> float:
        return self.usual.ms / self.seen.ms
