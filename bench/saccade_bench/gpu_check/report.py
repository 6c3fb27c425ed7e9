"""Create summary.json and report.md of a check: each figure with its floor, published results of
other servers, the target, and advice if it is far off.

They are made from the files that a check leaves in a folder, even if it did not finish. For results
that came back from a machine:

    python -m saccade_bench.gpu_check.report PLACE... [--out FOLDER] [--fill docs/speed.md ...]

PLACE is a returned folder, an archive (possibly truncated), or the printed output of a command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from saccade_bench.gpu_check.archive import unpack_into
from saccade_bench.gpu_check.correctness import RESULTS
from saccade_bench.gpu_check.figures import Figure, read_figures, read_printed
from saccade_bench.gpu_check.machine import keep_line
from saccade_bench.gpu_check.pytest_results import read_results
from saccade_bench.gpu_check.run import MAX_TAIL, OUTCOMES, Outcome
from saccade_bench.gpu_check.targets import (
    COPY,
    FAR,
    GPUS,
    PRODUCTS,
    Speeds,
    Target,
    advice_of,
    speeds_of,
    target_of,
)

TAIL_LINES = 15
COMMAND = "command.json"
"""What was run, when, and on which machine."""
FIGURES = ".figures.jsonl"
UNKNOWN = "a GPU that did not say its name"
BEGIN, END = "<!-- gpu-check -->", "<!-- end of gpu-check -->"
HEAD = "| card | figure | measured | floor | SGLang or vLLM | when, commit |"
SHOWN = (
    *("tests failed", "copy", "products of bf16"),
    *("decode, *, batch 1", "decode, *, batch 64", "decode, *, batch 256", "prefill, *"),
    *("decode, *, batch 64, temperature *", "tower, *, best", "start of a server, *"),
    *("chat at *, TTFT of round 1", "chat at *, TTFT of round 8"),
    *("ITL of streams alone, median", "ITL P99 beside images", "probe at *"),
    *("tower attention, * rows, best", "paged prefill, * over *, best"),
)
"""Patterns of the metrics that are shown in the table."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure with the values it is compared with.

    The `of_*` ratios are 1 if the figure equals the reference, and higher is better. They are None
    if there is no reference.
    """

    figure: Figure
    target: Target | None
    anchor: float | None
    of_floor: float | None
    of_anchor: float | None
    of_target: float | None

    @property
    def advice(self) -> str:
        share = self.of_target if self.of_floor is None else self.of_floor
        return "" if share is None else advice_of(self.figure.metric, share)


def judge(figure: Figure, speeds: Speeds | None) -> Verdict:
    """Compare a figure with the references of a GPU, or with its floor only if `speeds` is None."""
    target = target_of(figure.metric, speeds, more=figure.more) if speeds else None
    floor = figure.floor
    if floor is None and target is not None:
        floor = target.floor
    anchor = target.anchors.get(speeds.name) if target and speeds else None
    wanted = target.target if target else None
    shares = (_share(figure, bound) for bound in (floor, anchor, wanted))
    return Verdict(figure, target, anchor, *shares)


def measured_speeds(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> Speeds | None:
    """Return the GPU's speeds as measured by stage `speeds`, in this or an earlier command."""
    found = dict(facts.get("speeds", {}))
    found |= {each.metric: each.value for outcome in outcomes for each in outcome.figures}
    copy, products = found.get(COPY), found.get(PRODUCTS)
    return speeds_of(
        str(facts["hardware"].get("gpu", "")),
        copy and copy * 1e9,
        products and products * 1e12,
    )


def _share(figure: Figure, bound: float | None) -> float | None:
    if not bound or not figure.value:
        return None
    return figure.value / bound if figure.more else bound / figure.value


def summarise(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return all results of a check as JSON."""
    speeds, real = measured_speeds(facts, outcomes), _is_real(facts)
    stages = []
    for outcome in outcomes:
        verdicts = [judge(figure, speeds) for figure in outcome.figures]
        figures = [
            asdict(each.figure)
            | {
                "of_floor": each.of_floor,
                "of_anchor": each.of_anchor,
                "of_target": each.of_target,
                "advice": each.advice if real else "",
            }
            for each in verdicts
        ]
        stages.append(asdict(outcome) | {"figures": figures})
    return facts | {
        "skipped": {each.name: each.why for each in outcomes if each.status == "skipped"},
        "failed": {each.name: each.why for each in outcomes if failed(each)},
        "stages": stages,
    }


def failed(outcome: Outcome) -> bool:
    return outcome.status in ("failed", "timed out", "cut off")


def _is_real(facts: dict[str, Any]) -> bool:
    """Return False if the figures are meaningless, as on a CPU or with --quick."""
    return bool(facts["hardware"].get("gpu")) and not facts["quick"]


def read_folder(folder: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Read the results of a check: the facts, and the stages in the order in which they ran."""
    facts: dict[str, Any] = {"command": "?", "when": "?", "quick": False, "versions": {}}
    facts |= {"hardware": {}, "seconds": 0.0} | _read_json(folder / COMMAND)
    seen = _read_json(folder / "facts.json")
    facts["hardware"] = facts["hardware"] | seen
    ended = {}
    for line in _lines(folder / OUTCOMES):
        try:
            outcome = Outcome(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            break
        ended[outcome.name] = outcome
    begun = sorted(folder.glob(f"*{FIGURES}"), key=lambda path: path.stat().st_mtime)
    for name in (path.name.removesuffix(FIGURES) for path in begun):
        if name not in ended:
            ended[name] = Outcome(name, "", "cut off", why="not at its end when this was written")
    for name, outcome in ended.items():
        outcome.figures = read_figures(folder / f"{name}{FIGURES}")
        outcome.tail = "\n".join(_lines(folder / f"{name}.log"))[-MAX_TAIL:]
    tests = read_results(folder / RESULTS)
    if tests.outcomes or tests.bad or tests.unfinished:
        facts["tests"] = asdict(tests)
    facts["seconds"] = round(sum(each.seconds for each in ended.values()), 1)
    return facts, [*ended.values()]


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def _read_json(path: Path) -> dict[str, Any]:
    """Return an empty dict if the file is absent or truncated."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return found


def write_report(folder: Path) -> None:
    """Write summary.json and report.md from the other files in the folder."""
    facts, outcomes = read_folder(folder)
    summary = summarise(facts, outcomes)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(_markdown(facts, outcomes)) + "\n")


def _markdown(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
    gpu = str(facts["hardware"].get("gpu", ""))
    speeds, real = measured_speeds(facts, outcomes), _is_real(facts)
    versions = facts["versions"]
    yield f"# gpu-check on {gpu or facts['hardware'].get('cpu', UNKNOWN)}"
    yield ""
    yield f"`{facts['command']}`, {facts['when']}, {facts['seconds']} s."
    yield f"{', '.join(f'{name} {each}' for name, each in versions.items() if each)}."
    if not real:
        yield "**Tiny models or no GPU: the figures mean nothing; the run shows that this works.**"
    elif speeds is None:
        names = " and ".join(each.name for each in GPUS)
        yield f"Targets and anchors are for {names}, and left out here."
    else:
        yield (
            f"Floors and targets are those of {speeds.copy / 1e12:.2f} TB/s and "
            f"{speeds.products / 1e12:.0f} TFLOP/s."
        )
    if real:
        yield f"Before anything is mended, commit all of it: `{keep_line('PLACE', gpu)}`."
    yield ""
    yield "| stage | | seconds | |"
    yield "|---|---|---|---|"
    for each in outcomes:
        yield f"| {each.name} | {each.status} | {each.seconds:.0f} | {_cell(each.why)} |"
    if tests := facts.get("tests"):
        yield from _tests(tests)
    if real and (advised := list(_advice(outcomes, speeds))):
        yield ""
        yield "## What to try next"
        yield ""
        yield from advised
    for outcome in outcomes:
        if outcome.figures:
            yield from _table(outcome, speeds)
        if failed(outcome) and outcome.tail:
            yield ""
            yield f"### The end of {outcome.name}.log"
            yield ""
            yield "```"
            yield from outcome.tail.replace("```", "'''").splitlines()[-TAIL_LINES:]
            yield "```"


def _tests(tests: dict[str, Any]) -> Iterator[str]:
    """Yield the failed tests with the end of their output, and those that did not finish."""
    for test in tests["unfinished"]:
        yield ""
        yield f"Under way when the run ended: `{test}`"
    for test, said in tests["bad"].items():
        yield ""
        yield f"### {test}"
        yield ""
        yield "```"
        yield from said.replace("```", "'''").splitlines()[-TAIL_LINES:]
        yield "```"


def _advice(outcomes: Sequence[Outcome], speeds: Speeds | None) -> Iterator[str]:
    by_advice: dict[str, list[str]] = {}
    for outcome in outcomes:
        for figure in outcome.figures:
            if advice := judge(figure, speeds).advice:
                by_advice.setdefault(advice, []).append(figure.metric)
    for advice, metrics in by_advice.items():
        more = f" and {len(metrics) - 3} more" if len(metrics) > 3 else ""
        yield f"- **{'; '.join(metrics[:3])}{more}**: {advice}"


def _table(outcome: Outcome, speeds: Speeds | None) -> Iterator[str]:
    yield ""
    yield f"## {outcome.name}"
    yield ""
    yield "| | measured | floor | of floor | published | of published | target | met | note |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for figure in outcome.figures:
        verdict = judge(figure, speeds)
        target = verdict.target
        floor = figure.floor or (target.floor if target else None)
        met = verdict.of_target
        cells = [
            _cell(figure.metric),
            "**failed**" if figure.value is None else f"{_number(figure.value)} {figure.unit}",
            _number(floor),
            _percent(verdict.of_floor),
            _number(verdict.anchor),
            _percent(verdict.of_anchor),
            _number(target.target if target else None),
            "" if met is None else "yes" if met >= 1.0 else "**no**",
            _cell(figure.error or figure.note),
        ]
        yield f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    shown = f"{100 * share:.0f} %"
    return f"**{shown}**" if share < FAR else shown


def read_place(place: Path, folder: Path) -> None:
    """Copy or extract the results in `place` into `folder`."""
    paths = sorted(place.rglob("*")) if place.is_dir() else [place]
    files = [path for path in paths if path.is_file()]
    for path in files:
        if path.name.endswith((".tar.gz", ".tgz")):
            unpack_into(path.read_bytes(), folder)
    for path in files:
        if path.name.endswith((".json", ".jsonl", ".log", ".md", ".txt")):
            (folder / path.name).write_bytes(path.read_bytes())
        if path.suffix == ".txt":
            for stage, figures in read_printed(path.read_text(errors="replace")).items():
                lost = folder / f"{stage}{FIGURES}"
                if not lost.is_file():
                    lost.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in figures))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", type=Path, nargs="+", metavar="PLACE")
    parser.add_argument("--out", type=Path, help="folder for all of it: report, figures, logs")
    parser.add_argument("--card", help="the GPU's name, where what came back does not say it")
    parser.add_argument(
        "--fill", type=Path, nargs="+", default=[], help="texts whose table of figures is filled"
    )
    args = parser.parse_args(arguments)
    for number, place in enumerate(args.places):
        with tempfile.TemporaryDirectory(prefix="saccade-report-") as name:
            folder = Path(name)
            read_place(place, folder)
            if args.card:
                (folder / "facts.json").write_text(json.dumps({"gpu": args.card}))
            write_report(folder)
            facts, outcomes = read_folder(folder)
            print((folder / "report.md").read_text())
            if args.out:
                out = args.out if len(args.places) == 1 else args.out / f"{number + 1}"
                shutil.copytree(folder, out, dirs_exist_ok=True)
        for text in args.fill if _is_real(facts) else ():
            fill_table(text, table_rows(facts, outcomes))
    return 0


# ---- the table in the documentation, between two markers, with a row per GPU and figure


@dataclass(frozen=True, slots=True)
class TableRow:
    """The cells of a row."""

    card: str
    figure: str
    measured: str
    floor: str
    published: str
    when: str


def _is_shown(metric: str) -> bool:
    return any(fnmatchcase(metric, pattern) for pattern in SHOWN)


def fill_table(path: Path, rows: Sequence[TableRow]) -> None:
    """Insert rows into a document's table, replacing the rows of the same GPU and figure.

    Raises ValueError if the document has no markers.
    """
    whole = path.read_text()
    if BEGIN not in whole or END not in whole:
        raise ValueError(f"{path} has no table: a line {BEGIN} and a line {END} mark one")
    before, rest = whole.split(BEGIN, 1)
    old, after = rest.split(END, 1)
    known = {(row.card, row.figure): row for row in (*_read_rows(old), *rows)}
    lines = [BEGIN, HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for row in sorted(known.values(), key=lambda each: each.card):
        lines.append(f"| {' | '.join(astuple(row))} |")
    body = "\n".join(lines)
    path.write_text(f"{before}{body}\n{END}{after}")


def _read_rows(text: str) -> list[TableRow]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line != HEAD and len(cells) == HEAD.count("|") - 1 and not cells[0].startswith("---"):
            found.append(TableRow(*cells))
    return found


def table_rows(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> list[TableRow]:
    """Return the figures that the documentation's table shows."""
    speeds = measured_speeds(facts, outcomes)
    card = str(facts["hardware"]["gpu"])
    day, commit = facts["when"].split(" ")[0], (facts["versions"].get("saccade") or "")[:8]
    rows = []
    for figure in (each for outcome in outcomes for each in outcome.figures):
        if not _is_shown(figure.metric) or figure.value is None:
            continue
        verdict = judge(figure, speeds)
        floor = figure.floor or (verdict.target.floor if verdict.target else None)
        cells = _number(floor), _number(verdict.anchor), f"{day} {commit}".strip()
        rows.append(TableRow(card, figure.metric, f"{_number(figure.value)} {figure.unit}", *cells))
    return rows


if __name__ == "__main__":
    sys.exit(main())
