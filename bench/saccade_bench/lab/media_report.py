"""Results of `saccade bench media` by case and stage, and their tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table

from saccade_bench.options import Format, ImageContent

OUR_STAGES = ("base64", "digest", "header", "decode", "resize", "hand-over", "patches")
DEFAULT_STAGES = ("base64", "decode", "processor", "sha256", "pickle")
NAMES = {"random": "noise"}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of image."""

    width: int
    height: int
    format: Format
    content: ImageContent


@dataclass(frozen=True, slots=True)
class Sample:
    """The cost of a stage or of a full path: CPU ms, and the bytes that enter the stage or are sent
    to the engine.
    """

    ms: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class MediaFigure:
    """Results of one case, for Saccade (`stages`, `new`, `seen`) and the baseline.

    `stages` are the stages of a new image. Their "hand-over" is the remainder of `new`.
    """

    case: Case
    stages: dict[str, Sample]
    new: Sample
    seen: Sample
    usual_stages: dict[str, Sample]
    usual: Sample

    @property
    def gain_new(self) -> float:
        """CPU time of the baseline relative to the CPU time of a new image."""
        return self.usual.ms / self.new.ms

    @property
    def gain_seen(self) -> float:
        return self.usual.ms / self.seen.ms


def tables(results: Sequence[MediaFigure]) -> Group:
    """Return tables of the full paths, and of the stages of each."""
    return Group(
        _whole(results),
        "",
        _stages(
            "Saccade, a new picture: ms of CPU by stage",
            OUR_STAGES,
            [(r.case, r.stages) for r in results],
        ),
        "",
        _stages(
            "The usual way: ms of CPU by stage",
            DEFAULT_STAGES,
            [(r.case, r.usual_stages) for r in results],
        ),
    )


def _whole(results: Sequence[MediaFigure]) -> Table:
    table = Table(
        title="CPU of all processes, from a data URL to rows for the tower (medians)",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("picture")
    for name in (
        "encoded",
        "usual ms",
        "new ms",
        "less",
        "seen ms",
        "less",
        "usual ships",
        "new ships",
    ):
        table.add_column(name, justify="right")
    for r in results:
        sizes = [r.stages["digest"].nbytes, r.usual.nbytes, r.new.nbytes]
        encoded, usual, new = (f"{size / 1e6:.2f} MB" for size in sizes)
        times = (
            f"{r.usual.ms:.1f}",
            f"{r.new.ms:.2f}",
            f"{r.gain_new:.1f}x",
            f"{r.seen.ms:.3f}",
            f"{r.gain_seen:.0f}x",
        )
        table.add_row(label(r.case), encoded, *times, usual, new)
    return table


def _stages(
    title: str, names: Sequence[str], rows: Sequence[tuple[Case, dict[str, Sample]]]
) -> Table:
    """Return a table whose cells have the CPU ms and the input MB of a stage."""
    table = Table(title=title + " (MB that go into it)", title_justify="left", title_style="bold")
    table.add_column("picture")
    for stage in names:
        table.add_column(stage, justify="right")
    for case, stages in rows:
        cells = (stages.get(stage) for stage in names)
        table.add_row(
            label(case),
            *(f"{cell.ms:.2f} ({cell.nbytes / 1e6:.2f})" if cell else "-" for cell in cells),
        )
    return table


def label(case: Case) -> str:
    return (
        f"{case.width}x{case.height} {case.format.upper()} {NAMES.get(case.content, case.content)}"
    )
