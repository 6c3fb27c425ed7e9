"""Check that a server's memory stays within the bound that it prints at start-up.

    python -m saccade_bench.soak.drift --requests 10000 --images 500

Serves the demo model. Sends each image once, then questions about images in random order. Prints
memory and CPU time after each tenth. The exit status is 1 if memory grew by more than the bound.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from saccade_bench.fixtures.server import Server, serving
from saccade_bench.soak import drawn
from saccade_bench.soak.memory import held_by, processes

LIMITS = (
    *("--max-total-tokens", "65536", "--embedding-cache-device-mb", "64"),
    *("--tune", "arena_mb=64"),
)
"""Caches small enough to fill, because memory of caches that still grow would hide a leak."""
BOUND = re.compile(r"grows by at most (\d+) MiB")


def ask(server: Server, image: int, question: str) -> None:
    """Ask a question about an image. Raises AssertionError if the request fails."""
    content = [drawn.part(drawn.image_url(image)), {"type": "text", "text": question}]
    server.chat({"role": "user", "content": content}, max_tokens=8)


def memory(server: Server) -> float:
    """Return the PSS of all processes in MiB."""
    return sum(held.pss for held in held_by(server.process.pid).values())


def cpu_seconds(server: Server) -> float:
    """Return the CPU time of all processes so far."""
    times = [process.cpu_times() for _, process in processes(server.process.pid)]
    return float(sum(each.user + each.system for each in times))


def drift(server: Server, images: int, requests: int) -> bool:
    """Send the requests. Return True if memory stays within the bound."""
    found = BOUND.search(server.log.read_text())
    assert found, "start-up has printed no bound"
    bound, before = int(found[1]), memory(server)
    for image in range(images):
        ask(server, image, drawn.QUESTION)
    draw, tenth = random.Random(0), max(1, requests // 10)
    print(f"ready: {before:.0f} MiB, {images} new images: {memory(server) - before:+.0f} MiB")
    spent = cpu_seconds(server)
    for sent in range(1, requests + 1):
        seed = draw.randrange(images)
        ask(server, seed, drawn.QUESTION if sent % 2 else drawn.text(sent))
        if sent % tenth == 0:
            more, now = memory(server) - before, cpu_seconds(server)
            each = 1000 * (now - spent) / tenth
            print(f"{sent:6} requests: {more:+.0f} MiB, {each:.1f} ms of CPU each", flush=True)
            spent = now
    encoded = server.metric("saccade_images_encoded_total")
    more = memory(server) - before
    print(f"grown by {more:.0f} of at most {bound} MiB; {encoded:.0f} images encoded")
    return more <= bound


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--images", type=int, default=500)
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder, serving("demo", Path(folder), *LIMITS) as server:
        return not drift(server, given.images, given.requests)


if __name__ == "__main__":
    raise SystemExit(main())
