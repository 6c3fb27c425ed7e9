"""summary.json and report.md of a check: each figure beside its floor, what others have published,
and what we want; what to try where one is far off.

Knows figures and targets, not how they came about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade_bench.gpu_check.figures import Figure
from saccade_bench.gpu_check.run import Outcome
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure beside what it is held against. Shares: 1 is as good, more is better; None: there is
    nothing to compare with.
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
    """speeds: of the GPU; None where there are no targets for it."""
    target = target_of(figure.metric, speeds, more=figure.more) if speeds else None
    floor = figure.floor
    if floor is None and target is not None:
        floor = target.floor
    anchor = target.anchors.get(speeds.name) if target and speeds else None
    wanted = target.target if target else None
    shares = (_share(figure, bound) for bound in (floor, anchor, wanted))
    return Verdict(figure, target, anchor, *shares)


def measured_speeds(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> Speeds | None:
    """Of the GPU, as stage `speeds` has found them."""
    found = {each.metric: each.value for outcome in outcomes for each in outcome.figures}
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
    """All that a check has found, as JSON."""
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
    return outcome.status in ("failed", "timed out")


def _is_real(facts: dict[str, Any]) -> bool:
    """Whether the figures mean anything."""
    return bool(facts["hardware"].get("gpu")) and not facts["quick"]


def write_report(out: Path, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Both files. To be called after each stage, so that what ends the check ends no report."""
    summary = summarise(facts, outcomes)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (out / "report.md").write_text("\n".join(_markdown(facts, outcomes)) + "\n")


def _markdown(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
    gpu = str(facts["hardware"].get("gpu", ""))
    speeds, real = measured_speeds(facts, outcomes), _is_real(facts)
    versions = facts["versions"]
    yield f"# gpu-check on {gpu or facts['hardware'].get('cpu', 'a CPU')}"
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
    yield ""
    yield "| stage | | seconds | |"
    yield "|---|---|---|---|"
    for each in outcomes:
        yield f"| {each.name} | {each.status} | {each.seconds:.0f} | {_cell(each.why)} |"
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
