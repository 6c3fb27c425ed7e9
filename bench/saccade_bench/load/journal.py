"""Benchmark results on disk, as JSON lines.

`bench serve` and `bench ab` append them, `bench report` reads them. Lines of kind "run" (label,
options, time), "request" (one each) and "summary" have the id of their run in `run`. Lines of kind
"eval" have a label and a result. A file may hold any number of runs. NaN is written as null.
"""

from __future__ import annotations

import json
import math
import platform
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import ConfigError
from saccade_bench.eval.contract import EvalResult
from saccade_bench.load.datasets import Calibration
from saccade_bench.load.load import LoadRun, Record
from saccade_bench.load.measure import Summary, e2e, itls, output_tokens, tpot, ttft, vision_tokens
from saccade_bench.load.workload import outline

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    """One run read from a file. `started` is a Unix timestamp in seconds."""

    id: str
    label: str
    started: float
    options: Json
    requests: tuple[Json, ...]
    summary: Json


@dataclass(frozen=True, slots=True)
class SavedEval:
    """An accuracy evaluation read from a file."""

    label: str
    result: Json


def write_run(
    path: Path,
    label: str,
    options: Mapping[str, Any],
    run: LoadRun,
    summary: Summary,
    calibration: Calibration,
    save_text: bool,
) -> str:
    """Append a run and return its id."""
    run_id = uuid.uuid4().hex[:12]
    started = time.time() - (time.perf_counter() - run.start)
    head: Json = {
        "kind": "run",
        "run": run_id,
        "label": label,
        "started": round(started, 3),
        "client": {"python": platform.python_version(), "machine": platform.machine()},
        "calibration": asdict(calibration),
        "options": _plain(options),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for line in (
            head,
            *(_request(record, run, calibration, save_text) for record in run.records),
            {"kind": "summary", **_plain(asdict(summary))},
        ):
            file.write(json.dumps({"run": run_id, **line}) + "\n")
    return run_id


def write_eval(path: Path, label: str, result: EvalResult) -> None:
    """Append an accuracy evaluation."""
    with path.open("a") as file:
        file.write(json.dumps({"kind": "eval", "label": label, "result": asdict(result)}) + "\n")


def read_runs(path: Path) -> list[Saved]:
    """Return a file's complete runs (those with a summary). Raises ConfigError if it has none."""
    heads: dict[str, Json] = {}
    requests: dict[str, list[Json]] = {}
    runs: list[Saved] = []
    for data in _lines(path):
        kind, run = data["kind"], data.get("run", "")
        if kind == "run":
            heads[run], requests[run] = data, []
        elif kind == "request":
            requests[run].append(data)
        elif kind == "summary":
            head = heads[run]
            runs.append(
                Saved(
                    run, head["label"], head["started"], head["options"], tuple(requests[run]), data
                )
            )
    if not runs:
        raise ConfigError(f"{path}: no whole benchmark run in it")
    return runs


def read_evals(path: Path) -> list[SavedEval]:
    """Return the accuracy evaluations of a file."""
    return [
        SavedEval(data["label"], data["result"]) for data in _lines(path) if data["kind"] == "eval"
    ]


def _lines(path: Path) -> Iterator[Json]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            data["kind"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}:{number}: not a line of a benchmark run") from None
        yield data


def _request(record: Record, run: LoadRun, calibration: Calibration, save_text: bool) -> Json:
    """Return one request as JSON. Times are in ms, and `sent` counts from the start of the run."""
    reply, turn = record.reply, record.turn
    line: Json = {
        "kind": "request",
        "session": record.session,
        "round": record.round + 1,
        "tenant": record.tenant,
        "images": turn.images,
        "images_seen": turn.seen,
        "body_bytes": record.body_bytes,
        "sent": _ms(reply.sent - run.start),
        "late": _ms(reply.sent - record.due),
        "failure": None if reply.failure is None else asdict(reply.failure),
    }
    if reply.failure is None:
        line |= {
            "ttft": round(ttft(record), 3),
            "e2e": round(e2e(record), 3),
            "tpot": None if (pace := tpot(record)) is None else round(pace, 3),
            "itl": [round(gap, 3) for gap in itls(record)],
            "prompt_tokens": reply.usage.prompt,
            "vision_tokens": vision_tokens(record, calibration),
            "cached_tokens": reply.usage.cached,
            "output_tokens": output_tokens(record),
            "finish": reply.finish,
        }
    if reply.trace is not None:
        line["saccade"] = reply.trace
    if turn.expected is not None:
        line["expected"] = turn.expected
    if save_text or turn.expected is not None:
        line["text"] = reply.text
    if save_text:
        line["messages"] = outline(turn)
    return line


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _plain(value: Any) -> Any:
    """Convert to standard JSON: infinities become strings, and NaN becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, Path) else value
