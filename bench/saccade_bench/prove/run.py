"""`saccade prove`: run all cases, print a table row as each ends, and return the results."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict, dataclass
from functools import partial

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from saccade.core.errors import ConfigError
from saccade.tools.server import first_model, root, unreachable
from saccade_bench.load.client import headers
from saccade_bench.load.workload import parse_extra
from saccade_bench.options import ProveOptions, TargetOptions
from saccade_bench.prove.cases import CASES, Finding, Trial, TwinCase, judge
from saccade_bench.prove.client import Asker
from saccade_bench.prove.pictures import numbers

TIMEOUT = 120.0
EACH = 32
"""Numbers reserved for each case."""
STYLES = {"kept apart": "green", "MIXED UP": "bold red", "not judged": "yellow"}


@dataclass(frozen=True, slots=True)
class Proof:
    """The findings by case name."""

    findings: dict[str, Finding]

    @property
    def mixed_up(self) -> list[str]:
        return [name for name, each in self.findings.items() if each.verdict == "MIXED UP"]


def prove(target: TargetOptions, options: ProveOptions) -> Proof:
    """Run all cases on a server, print the findings, and save them if requested.

    Raises ConfigError if the options are invalid, or if the server fails.
    """
    cases = chosen(options.cases)
    address = root(target.url)
    timeout = target.timeout or TIMEOUT
    sent, extra = headers(target), parse_extra(target.extra_request_body)
    model = target.model or first_model(address, sent, timeout)
    try:
        proof = asyncio.run(_all(Asker(address, model, sent, timeout, extra), cases, options))
    except httpx.HTTPStatusError as error:
        raise ConfigError(
            f"{address} answers HTTP {error.response.status_code}: {error.response.text[:300]}"
        ) from None
    except httpx.HTTPError as error:
        raise unreachable(address, error) from None
    if options.output_file:
        options.output_file.write_text(_json(address, model, proof))
    return proof


def chosen(names: tuple[str, ...]) -> list[TwinCase]:
    """Return the cases with these names, or all if there are none. Raises ConfigError."""
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--cases {unknown[0]!r}: cases are {', '.join(known)}")
    return [known[name] for name in names] if names else list(CASES)


async def _all(requester: Asker, cases: list[TwinCase], options: ProveOptions) -> Proof:
    console = Console(highlight=False)
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(48)
    supply = iter(numbers(seed, EACH * len(CASES) + options.images))
    found: dict[str, Finding] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    async with requester:
        with Progress(*columns, console=console, transient=True) as bar:
            for case in cases:
                task = bar.add_task(
                    case.name, total=2 * options.images if case.name == "many" else None
                )
                trial = Trial(
                    requester, supply, options.images, options.host, partial(bar.advance, task)
                )
                finding = found[case.name] = await judge(case, trial)
                bar.remove_task(task)
                _print(console, case, finding)
    proof = Proof(found)
    judged = sum(each.verdict != "not judged" for each in found.values())
    console.print(
        f"{judged} of {len(found)} cases judged (seed {seed}): "
        + (f"mixed up: {', '.join(proof.mixed_up)}" if proof.mixed_up else "no image was mixed up")
    )
    return proof


def _print(console: Console, case: TwinCase, finding: Finding) -> None:
    style = STYLES[finding.verdict]
    console.print(
        f"[{style}]{finding.verdict:10}[/]  {case.name:9}  {case.differs}"
        + (f"\n{'':23}{finding.why}" if finding.why else ""),
        soft_wrap=True,
    )


def _json(address: str, model: str, proof: Proof) -> str:
    findings = {name: asdict(each) for name, each in proof.findings.items()}
    return json.dumps({"server": address, "model": model, "findings": findings}, indent=2) + "\n"
