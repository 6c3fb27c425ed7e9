"""Compare the CPU time of new photos on two servers of one model, with alternating requests.

    python -m saccade_bench.screens.photos URL,PID URL,PID [--resolution 1440p] [--rounds 30]

PID is the server's main process. For example, serve two checkouts, with and without tile hashes.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from saccade_bench.image_files import image_part
from saccade_bench.load.images import DrawnImage, encode, parse_resolution


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a server's processes, with nanosecond precision."""
    server = psutil.Process(pid)
    spent = 0
    for process in (server, *server.children(recursive=True)):
        for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            spent += int(task.read_text().split()[0])
    return spent / 1e9


class PhotoServer:
    """A server, and the CPU seconds that each photo took."""

    def __init__(self, word: str) -> None:
        url, pid = word.rsplit(",", 1)
        self.url, self._pid = url, int(pid)
        self._http = httpx.Client(base_url=url, timeout=600)
        self._model = self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self.spent: list[float] = []

    def ask(self, photo: bytes) -> None:
        """Send a photo, and record its CPU time."""
        parts = [image_part(photo, "image/jpeg"), {"type": "text", "text": "go"}]
        messages = [{"role": "user", "content": parts}]
        before = cpu_seconds(self._pid)
        body = {"model": self._model, "messages": messages, "max_tokens": 1}
        self._http.post("/v1/chat/completions", json=body).raise_for_status()
        self.spent.append(cpu_seconds(self._pid) - before)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("servers", nargs=2, metavar="URL,PID")
    parser.add_argument("--resolution", default="1440p")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args(words)
    servers = [PhotoServer(word) for word in given.servers]
    width, height = parse_resolution(given.resolution, "--resolution").low
    first = secrets.randbelow(1 << 32)  # so that photos of earlier runs are not repeated
    for turn in range(given.rounds + 1):
        photo = encode(DrawnImage("photo", width, height, first + turn))
        for server in servers if turn % 2 else servers[::-1]:
            server.ask(photo)
    table = Table("server", "least", "median", title=f"CPU seconds of a new {width}x{height} photo")
    for server in servers:
        spent = server.spent[1:]  # the first is a warm-up
        table.add_row(server.url, f"{min(spent):.4f}", f"{median(spent):.4f}")
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
