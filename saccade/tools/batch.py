"""`saccade batch`: a file of requests, as OpenAI's Batch API has them, answered by a server that is
there or by one that is started for it.

The server keeps the batch: what is lost here is only the sight of it. No file is held whole.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from saccade.core.errors import ConfigError
from saccade.core.given_paths import reason, regular, shown
from saccade.core.own_server import own_server
from saccade.tools.server import refusal, root, unreachable

TIMEOUT = 60.0
START_SECONDS = 600.0
LOOK_SECONDS = 0.5
LONGEST_LINE = 256 << 20
OVER = frozenset(("completed", "failed", "expired", "cancelled"))
Show = Callable[[int, int], None]
"""Told lines that are done, of how many."""


def run_batch(
    file: Path, base_url: str | None, api_key: str | None, model: str, output: Path
) -> int:
    """Have a file answered, and write the answers to `output`, and errors, if there are any, beside
    it; the exit status: 0 only if every line has an answer. Raises ConfigError.
    """
    endpoint = first_url(file)
    console = Console(stderr=True)
    if base_url is not None:
        return _answered(root(base_url), api_key, file, endpoint, output, console)
    with served(model) as address:
        return _answered(address, None, file, endpoint, output, console)


def first_url(file: Path) -> str:
    """Where the file's first line is to be asked, as all others are. Raises ConfigError."""
    try:
        with open(file, encoding="utf-8", opener=regular) as lines:
            url = json.loads(lines.readline(LONGEST_LINE))["url"]
    except OSError as error:
        raise ConfigError(f"{shown(file)}: {reason(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        url = None
    if not isinstance(url, str):
        raise ConfigError(
            f'{file}: line 1 is no request: expected {{"custom_id": "...", "method": "POST", '
            '"url": "/v1/chat/completions", "body": {...}}'
        )
    return url


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server of `model`, which ends with the context. Raises ConfigError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = (model, "--port", str(port), "--disable-page")
    with own_server(*options, output=sys.stderr) as server:
        _wait_until_ready(address, server)
        yield address


def _wait_until_ready(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{address}/health").is_success:
                return
        time.sleep(0.1)
    raise ConfigError("the server did not start: it says above why")


def _answered(
    address: str, key: str | None, file: Path, endpoint: str, output: Path, console: Console
) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with httpx.Client(base_url=f"{address}/v1", headers=headers, timeout=TIMEOUT) as client:
        try:
            batch = _begin(client, file, endpoint)
            with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
                task = progress.add_task(batch["id"], total=None)
                batch = _await(
                    client, batch, lambda done, of: progress.update(task, completed=done, total=of)
                )
            return _fetch(client, batch, output, console)
        except httpx.TransportError as error:
            raise unreachable(address, error) from None
        except KeyboardInterrupt:
            console.print(f"the batch stays with its server; GET {address}/v1/batches finds it")
            raise


def _begin(client: httpx.Client, file: Path, endpoint: str) -> dict[str, Any]:
    with file.open("rb") as opened:
        sent = _checked(
            client.post("/files", files={"file": (file.name, opened)}, data={"purpose": "batch"})
        )
    asked = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": "24h"}
    return _checked(client.post("/batches", json=asked))


def _await(client: httpx.Client, batch: dict[str, Any], show: Show) -> dict[str, Any]:
    """The batch, once it is over."""
    while True:
        counts = batch["request_counts"]
        show(counts["completed"] + counts["failed"], counts["total"])
        if batch["status"] in OVER:
            return batch
        time.sleep(LOOK_SECONDS)
        batch = _checked(client.get(f"/batches/{batch['id']}"))


def _fetch(client: httpx.Client, batch: dict[str, Any], output: Path, console: Console) -> int:
    errors = output.with_suffix(f".errors{output.suffix}")
    for field, path in (("output_file_id", output), ("error_file_id", errors)):
        if batch[field] is not None:
            _download(client, batch[field], path)
    counts = batch["request_counts"]
    console.print(
        f"{batch['status']}: {counts['completed']} answers in {output}"
        + (f", {counts['failed']} errors in {errors}" if counts["failed"] else "")
    )
    for fault in (batch["errors"] or {"data": []})["data"]:
        where = f"line {fault['line']}: " if fault.get("line") else ""
        console.print(f"{where}{fault['message']}", markup=False)
    whole = batch["status"] == "completed" and counts["completed"] == counts["total"]
    return 0 if whole else 1


def _download(client: httpx.Client, id: str, path: Path) -> None:
    """Whole, or not there."""
    part = path.with_name(f"{path.name}.part")
    with client.stream("GET", f"/files/{id}/content") as answer, part.open("wb") as file:
        if not answer.is_success:
            raise ConfigError(refusal(answer.status_code, answer.read().decode()))
        for piece in answer.iter_bytes():
            file.write(piece)
    part.replace(path)


def _checked(answer: httpx.Response) -> dict[str, Any]:
    """The answer's body. Raises ConfigError with the server's words for a refusal."""
    if not answer.is_success:
        raise ConfigError(refusal(answer.status_code, answer.text))
    found: dict[str, Any] = answer.json()
    return found
