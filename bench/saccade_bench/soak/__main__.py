"""Check that a server stays correct and does not leak memory under all kinds of requests.

    python -m saccade_bench.soak --seconds 3600 --output soak.json
    python -m saccade_bench.soak --seconds 600 --ranker FOLDER    # also scores and ranks

Serves the demo model with caches so small that all of them evict, and a second server as a cold
reference. Each client repeatedly picks a kind of request and a seed. The answer must equal the
answer of the reference server, which is asked once per request, without concurrency and with
flushed caches. Prints the memory of each process once a minute. The exit status is 1 if an answer
or a status was wrong. Only uses the loopback interface.
"""

from __future__ import annotations

import argparse
import http.server
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from saccade_bench.fixtures.server import Server, serving
from saccade_bench.metrics import series
from saccade_bench.soak import drawn
from saccade_bench.soak.kinds import KINDS, Kind, SoakClient
from saccade_bench.soak.memory import held_by

SMALL = (
    *("--allow-private-media", "--tune", "arena_mb=16", "--max-total-tokens", "16384"),
    *("--context-length", "4096", "--embedding-cache-device-mb", "2", "--pooling", "last"),
    *("--tune", "responses_mb=4", "--max-running-requests", "8"),
)
COLD = ("--tune", "disable_radix_cache=true", "--speculative", "off")
NEW = 1 << 20
"""Seeds from here on are used once."""
COMPARED_SHARE = 16
"""One in this many requests with a new seed is compared."""
KEPT_FAULTS = 50
METRICS = (
    'saccade_kv_pages{owner="free"}',
    'saccade_kv_pages{owner="prefix"}',
    'saccade_kv_pages{owner="sequence"}',
    "saccade_arena_bytes_in_use",
    "saccade_requests_in_flight",
    "saccade_request_bytes_buffered",
    "saccade_images_encoded_total",
    "saccade_decode_worker_restarts_total",
)


class Reference:
    """Answers of a server with empty caches, by kind and seed. This class is thread-safe."""

    def __init__(self, asker: SoakClient) -> None:
        self._asker = asker
        self._answers: dict[tuple[str, int], str] = {}
        self._asking = threading.Lock()

    def answer(self, kind: Kind, seed: int) -> str:
        """Return the expected answer. Raises UnexpectedStatus if the request fails."""
        key = kind.name, seed
        with self._asking:
            if key not in self._answers:
                self._asker.send("POST", "/flush_cache")
                self._answers[key] = json.dumps(kind.ask(self._asker, seed))
            return self._answers[key]


@dataclass
class Counts:
    """Counts of requests by kind and outcome."""

    asked: Counter[str]
    compared: Counter[str]
    wrong: Counter[str]
    failed: Counter[str]
    faults: list[str]


class Run:
    """Clients that send random requests until time is up."""

    def __init__(self, reference: Reference, kinds: Sequence[Kind]) -> None:
        self._reference = reference
        self._kinds = kinds
        self._lock = threading.Lock()
        self._newest = NEW
        self._over = threading.Event()
        self.counts = Counts(Counter(), Counter(), Counter(), Counter(), [])

    def end(self) -> None:
        self._over.set()

    def work(self, asker: SoakClient, seed: int) -> None:
        """Run one client."""
        draw = random.Random(seed)
        weights = [kind.weight for kind in self._kinds]
        while not self._over.is_set():
            kind = draw.choices(self._kinds, weights)[0]
            number = draw.randrange(kind.pool) if kind.pool else self._next()
            self._ask(asker, kind, number)

    def _next(self) -> int:
        with self._lock:
            self._newest += 1
            return self._newest

    def _ask(self, asker: SoakClient, kind: Kind, seed: int) -> None:
        counts, name = self.counts, kind.name
        compared = kind.compared and (seed < NEW or seed % COMPARED_SHARE == 0)
        try:
            answer = json.dumps(kind.ask(asker, seed))
            right = self._reference.answer(kind, seed) if compared else answer
        except Exception as error:  # if a response lacks anything, the server is at fault
            self._note(counts.failed, f"{name} {seed}: {type(error).__name__}: {error}", name)
            return
        with self._lock:
            counts.asked[name] += 1
            counts.compared[name] += compared
        if answer != right:
            self._note(counts.wrong, f"{name} {seed}: {answer[:300]} not {right[:300]}", name)

    def _note(self, where: Counter[str], words: str, name: str) -> None:
        with self._lock:
            where[name] += 1
            if len(self.counts.faults) < KEPT_FAULTS:
                self.counts.faults.append(words)


@contextmanager
def images_by_url() -> Iterator[str]:
    """Serve the image of a seed at /SEED."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = drawn.image(int(self.path[1:]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "max-age=5")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def sample(server: Server, run: Run, seconds: float) -> dict[str, Any]:
    """Return the current state of a server."""
    found = series(httpx.get(f"{server.url}/metrics", timeout=120).text)
    return {
        "seconds": round(seconds),
        "requests": run.counts.asked.total(),
        "processes": {name: asdict(held) for name, held in held_by(server.process.pid).items()},
        "metrics": {name: value for name, value in found.items() if name in METRICS},
    }


def describe(taken: dict[str, Any], counts: Counts) -> str:
    """Return a sample as one line of text."""
    held = (
        f"{name} {each['rss']:.0f}/{each['pss']:.0f}/{each['heap'] + each['anonymous']:.0f}"
        for name, each in taken["processes"].items()
    )
    return (
        f"{taken['seconds']:5} s {taken['requests']:6} asked, {counts.compared.total()} compared, "
        f"{counts.wrong.total()} wrong, {counts.failed.total()} failed; " + ", ".join(held)
    )


def soak(server: Server, run: Run, askers: Sequence[SoakClient], given: argparse.Namespace) -> None:
    """Send requests until the time is up, and write a sample every `--every` seconds."""
    threads = [
        threading.Thread(target=run.work, args=(asker, seed)) for seed, asker in enumerate(askers)
    ]
    begun, samples = time.monotonic(), []

    def note() -> None:
        samples.append(sample(server, run, time.monotonic() - begun))
        print(describe(samples[-1], run.counts), flush=True)
        statuses: Counter[int] = Counter()
        for asker in askers:
            statuses.update(asker.statuses)
        log = server.log.read_text(errors="replace")
        result = {
            "counts": vars(run.counts),
            "statuses": statuses,
            "tracebacks": log.count("Traceback (most recent"),
            "samples": samples,
        }
        given.output.write_text(json.dumps(result, indent=1))

    note()
    for thread in threads:
        thread.start()
    while time.monotonic() - begun < given.seconds:
        time.sleep(min(given.every, max(0.0, given.seconds - (time.monotonic() - begun))))
        note()
    run.end()
    for thread in threads:
        thread.join()
    time.sleep(5)
    note()


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between samples")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=[], help="kinds of requests, by name")
    parser.add_argument("--ranker", type=Path, help="folder of a checkpoint that ranks")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="data type of the demo model; in others, answers may depend on cached content",
    )
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    given = parser.parse_args(words)
    kinds = [
        kind
        for kind in KINDS
        if (not given.only or kind.name in given.only) and (kind.name != "rank" or given.ranker)
    ]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        origin = stack.enter_context(images_by_url())
        folders = [Path(name) / each for each in ("server", "cold", "ranker")]
        for folder in folders:
            folder.mkdir()
        dtype = ("--dtype", given.dtype)
        options = [(*dtype, "--files-dir", str(folder / "files")) for folder in folders]
        server = stack.enter_context(serving("demo", folders[0], *SMALL, *options[0]))
        cold = stack.enter_context(serving("demo", folders[1], *SMALL, *COLD, *options[1]))
        ranker = ""
        if given.ranker:
            ranker = stack.enter_context(serving(given.ranker, folders[2], *options[2])).url

        def client(url: str) -> SoakClient:
            found = httpx.Client(base_url=url, timeout=180)
            return SoakClient(stack.enter_context(found), origin, ranker)

        run = Run(Reference(client(cold.url)), kinds)
        soak(server, run, [client(server.url) for _ in range(given.clients)], given)
    counts = run.counts
    print(*counts.faults, sep="\n")
    return bool(counts.wrong or counts.failed)


if __name__ == "__main__":
    raise SystemExit(main())
