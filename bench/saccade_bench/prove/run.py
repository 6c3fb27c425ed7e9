"""`saccade prove`: run all cases, print a table row as each ends, and return the results."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from saccade_bench.prove.cases import CASES, Finding, Trial, TwinCase, judge
from saccade_bench.prove.client import Asker, refusal
from saccade_bench.prove.cold import ColdFinding, compare
from saccade_bench.prove.options import MAX_IMAGES, ProveError, ProveOptions
from saccade_bench.prove.pictures import numbers

TIMEOUT = 120.0
EACH = 32
"""Numbers reserved for each case."""
STYLES = {"kept apart": "green", "MIXED UP": "bold red", "not judged": "yellow"}


@dataclass(frozen=True, slots=True)
class ProvedServer:
    """A server to ask. `extra` is merged into every request body."""

    url: str
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = TIMEOUT
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The URL without the optional suffix /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    def asker(self) -> Asker:
        """Create a client for the model, or for the first that the server lists.

        Raises ProveError.
        """
        model = self.model or self._first_model()
        return Asker(self.address, model, dict(self.headers), self.timeout, self.extra)

    def _first_model(self) -> str:
        listed = f"{self.address}/v1/models"
        reply = httpx.get(listed, headers=dict(self.headers), timeout=self.timeout)
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            why = refusal(reply.status_code, reply.text)
            raise ProveError(
                f"{listed} lists no model (HTTP {reply.status_code}): {why}; name one with --model"
            ) from None


@dataclass(frozen=True, slots=True)
class Proof:
    """The findings by case name. `cold`: those of answers compared with cold ones, if they were."""

    findings: dict[str, Finding]
    cold: dict[str, ColdFinding]
    requests: dict[str, list[dict[str, Any]]]
    """For each case in which images were mixed up: the bodies that were sent, in order."""

    @property
    def mixed_up(self) -> list[str]:
        return [name for name, each in self.findings.items() if each.verdict == "MIXED UP"]

    @property
    def unlike_cold(self) -> list[str]:
        return [name for name, each in self.cold.items() if each.others]

    @property
    def as_json(self) -> dict[str, Any]:
        """The evidence of both kinds."""
        return asdict(self)


def prove(
    server: ProvedServer, options: ProveOptions, restart: Callable[[], None] | None = None
) -> Proof:
    """Run all cases on a server, print the findings, and save them if requested.

    restart: restarts the server, in place of `options.restart_command`.

    Raises ProveError if the options are invalid, or if the server fails.
    """
    if restart is None and options.restart_command:
        restart = partial(_restart, options.restart_command)
    cases = chosen(options.cases)
    if not 1 <= options.images <= MAX_IMAGES:
        raise ProveError(f"--images {options.images}: expected 1 to {MAX_IMAGES:,}")
    try:
        requester = server.asker()
        cold = (
            ProvedServer(options.cold_url, timeout=server.timeout, extra=server.extra).asker()
            if options.cold_url
            else None
        )
        proof = asyncio.run(_all(requester, cold, cases, options, restart))
    except TimeoutError:
        raise ProveError(
            f"{server.address} is not ready {server.timeout:g} s after a restart"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProveError(
            f"cannot connect to {server.address} ({error}): is the server running? Set its address "
            "with --base-url"
        ) from None
    if options.output_file:
        report = {"server": server.address, "model": requester.model, **proof.as_json}
        options.output_file.write_text(json.dumps(report, indent=2) + "\n")
    return proof


def chosen(names: tuple[str, ...]) -> list[TwinCase]:
    """Return the cases with these names, or all if there are none. Raises ProveError."""
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise ProveError(f"--cases {unknown[0]!r}: cases are {', '.join(known)}")
    return [known[name] for name in names] if names else list(CASES)


def _restart(command: str) -> None:
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        raise ProveError(
            f"--restart-command {command!r} exits with status {done.returncode}: "
            f"{done.stderr.strip()[-300:]}"
        )


async def _all(
    requester: Asker,
    cold: Asker | None,
    cases: list[TwinCase],
    options: ProveOptions,
    restart: Callable[[], None] | None,
) -> Proof:
    console = Console(highlight=False)
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(48)
    supply = iter(numbers(seed, EACH * len(CASES) + options.images))
    proof = Proof({}, {}, {})
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    async with AsyncExitStack() as stack:
        for client in (requester, cold):
            if client is not None:
                await stack.enter_async_context(client)
        bar = stack.enter_context(Progress(*columns, console=console, transient=True))
        for case in cases:
            task = bar.add_task(
                case.name, total=2 * options.images if case.name == "many" else None
            )
            trial = Trial(
                requester, supply, options.images, options.host, partial(bar.advance, task), restart
            )
            requester.exchanges.clear()
            finding = proof.findings[case.name] = await judge(case, trial)
            sent = list(requester.exchanges)
            if cold is not None:
                proof.cold[case.name] = await compare(sent, cold)
            if finding.verdict == "MIXED UP":
                proof.requests[case.name] = [each.body for each in sent]
            bar.remove_task(task)
            _print(console, case, finding, proof.cold.get(case.name))
    console.print(f"{_summary(proof)} (seed {seed})")
    return proof


def _summary(proof: Proof) -> str:
    judged = sum(each.verdict != "not judged" for each in proof.findings.values())
    mixed = list(dict.fromkeys([*proof.mixed_up, *proof.unlike_cold]))
    return f"{judged} of {len(proof.findings)} cases judged: " + (
        f"mixed up: {', '.join(mixed)}" if mixed else "no image was mixed up"
    )


def _print(console: Console, case: TwinCase, finding: Finding, cold: ColdFinding | None) -> None:
    style = STYLES[finding.verdict]
    lines = [f"[{style}]{finding.verdict:10}[/]  {case.name:9}  {case.differs}"]
    if finding.why:
        lines.append(f"{'':23}{finding.why}")
    if cold is not None and cold.others:
        count = cold.own + cold.others + cold.undecided
        lines.append(f"{'':23}[bold red]{cold.others} of {count} answers are another image's[/]")
    console.print("\n".join(lines), soft_wrap=True)
