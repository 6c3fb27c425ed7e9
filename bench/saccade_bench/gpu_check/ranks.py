"""Stage `ranks`: compare a server with a model on two GPUs with one on a single GPU: the top first
tokens, the time per output token, and whether CUDA graphs are used. Skipped if there is only one
GPU. On a CPU, two processes use gloo and then shared memory for all-reduce.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from saccade_bench.gpu_check.figures import Figure, FigureFile, run_stage
from saccade_bench.gpu_check.serving import SMALL_SERVER, count_steps, server_command
from saccade_bench.image_files import image_part, save
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.started import Side, running

WAYS = {"cuda": ("nccl", "symm-mem"), "cpu": ("gloo", "shm")}
"""All-reduce backends to test (`--tune all_reduce`)."""
PROMPTS = ("What is shown?", "Count from one to ten.", "Name a colour, then another one.")
LIKELY = 5
"""Number of top tokens whose log-probabilities are compared."""
MAX_DIFFERENCE = 0.1
"""Maximum difference in nats, for bfloat16 and sums split over two ranks."""
TOKENS = 64


@dataclass(frozen=True, slots=True)
class Seen:
    """The responses of a server.

    likely: log-probabilities of the top first tokens for each prompt.
    ms: milliseconds per output token.
    graphs: (graph replays, steps).
    """

    likely: tuple[dict[str, float], ...]
    ms: float
    graphs: tuple[float, float]


def main() -> int:
    return run_stage("ranks", __doc__, measure)


def measure(args: Any, file: FigureFile) -> None:
    """Measure one rank, then two ranks with each all-reduce backend."""
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < 2:
        note = "skipped: two ranks need two GPUs"
        file.add(Figure("GPUs for ranks", gpus, "GPUs", more=True, note=note))
        return
    preset = "tiny-qwen3-vl" if args.quick else args.preset
    until, logs = time.monotonic() + args.seconds, args.figures.parent.resolve()
    with tempfile.TemporaryDirectory(prefix="saccade-check-") as name:
        folder = make_checkpoint(preset, Path(name) / "model")

        def ask(ranks: int, way: str) -> Seen:
            options = ["--tp-size", str(ranks)]
            options += SMALL_SERVER if args.quick else ()
            options += ("--tune", f"all_reduce={way}") if ranks > 1 else ()
            side = Side(f"ranks-{way}", server_command(folder, args.device, *options))
            with running(side, logs, until - time.monotonic()) as server:
                return look(server.url)

        def beside(way: str, alone: Seen) -> None:
            found = ask(2, way)
            for figure in figures(f"{preset}, 2 ranks, {way}", alone, found):
                file.add(figure)
            if (most := difference(alone, found)) > MAX_DIFFERENCE:
                raise ArithmeticError(f"log-probabilities differ by {most:.2g}")

        alone = ask(1, "alone")
        for way in WAYS[args.device]:
            file.attempt(f"{preset}, 2 ranks, {way}", partial(beside, way, alone))


def figures(name: str, alone: Seen, found: Seen) -> tuple[Figure, ...]:
    """Return the figures of two ranks compared with one."""
    replays, steps = found.graphs
    return (
        Figure(f"{name}, log-probabilities differ", difference(alone, found), "nats"),
        Figure(f"{name}, a token", found.ms, "ms", note=f"one rank: {alone.ms:.2f}"),
        Figure(f"{name}, steps by graphs", 100 * replays / max(1.0, steps), "%", more=True),
    )


def difference(one: Seen, other: Seen) -> float:
    """Return the maximum difference between log-probabilities of first tokens that both have.

    Raises ArithmeticError if there is no such token.
    """
    most = 0.0
    for mine, theirs in zip(one.likely, other.likely, strict=True):
        if not (both := mine.keys() & theirs.keys()):
            raise ArithmeticError("no token is likely to both")
        most = max(most, *(abs(mine[token] - theirs[token]) for token in both))
    return most


def look(url: str) -> Seen:
    """Request the top first tokens of each prompt, and time one longer answer. The first prompt has
    an image.
    """
    likely = []
    for number, prompt in enumerate(PROMPTS):
        answer = post(url, prompt, image=not number, max_tokens=1, top_logprobs=LIKELY)
        found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        likely.append({str(each["bytes"]): each["logprob"] for each in found})
    began = time.perf_counter()
    post(url, PROMPTS[1], image=False, max_tokens=TOKENS, ignore_eos=True)
    seconds = time.perf_counter() - began
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as metrics:
        graphs = count_steps(metrics.read().decode())
    return Seen(tuple(likely), 1e3 * seconds / TOKENS, graphs)


def post(url: str, prompt: str, *, image: bool, **fields: object) -> Any:
    """Send a chat and return the response."""
    content: list[dict[str, object]] = [{"type": "text", "text": prompt}]
    if image:
        content.insert(
            0, image_part(save(Image.linear_gradient("L").resize((160, 96)).convert("RGB")))
        )
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0}
    body |= fields | ({"logprobs": True} if "top_logprobs" in fields else {})
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
