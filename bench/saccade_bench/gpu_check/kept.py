"""Stage `kept`: KV that leaves the device and comes back. An answer that begins from pages out of
host memory, or off the disk, is that from pages that stayed, with the same log-probabilities bit
for bit; and how fast pages go to host memory and come from there.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saccade.core.config import Dtype, PageTierConfig
from saccade.core.options import EngineOptions
from saccade.core.page_store import PAGE_FILE
from saccade.core.plan import PageCopy, PageTier
from saccade.core.types import Request, TokenLogprobs
from saccade.runtime.page_host import HostPages
from saccade.sched.parts.page_arrivals import ReadRates
from saccade_bench.gpu_check.engine_here import EngineHere
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.model import RandomModel, make_model

PRESET = "qwen3-vl-2b"
TOKENS: Mapping[PageTier, int] = {"host": 8192, "disk": 2048}
ANSWER = 16
ALTERNATIVES = 20
ROUNDS = 3
WRITE_SECONDS = 20.0
"""Until the disk must have taken all pages."""
LAYER_PARTS, PART_BYTES, PAGES = 2 * 28, 32 << 10, 512
"""Of a 2B model: keys and values of its layers, 16 tokens each; 8k tokens."""


class Patient(ReadRates):
    """Pages are read and waited for, however quick computing is: it is their contents that count
    here.
    """

    def computed(self, tokens: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer: its log-probabilities, the tokens of the prompt that were cached, of these those
    out of a tier, and the milliseconds until its first token.
    """

    tokens: tuple[TokenLogprobs, ...]
    cached: int
    restored: Mapping[str, int]
    ms: float


def ask(engine: EngineHere, request: Request, name: str) -> Heard:
    sampling = replace(request.sampling, logprobs=ALTERNATIVES)
    began = time.perf_counter()
    progress = engine.run([replace(request, id=name, sampling=sampling)])
    first = next(delta for delta in progress.news if delta.tokens)
    told = tuple(each for delta in progress.news for each in delta.logprobs)
    ms = 1e3 * (progress.first[name] - began)
    return Heard(told, first.cached_tokens, dict(first.restored), ms)


def evict(engine: EngineHere) -> None:
    """Until every page of the prefix cache lies in a tier alone."""
    prefix, disk = engine.scheduler.prefix, engine.worker.pages.disk
    assert prefix is not None and prefix.kept is not None
    prefix.evict(prefix.evictable)
    engine.run([])
    until = time.monotonic() + WRITE_SECONDS
    while disk is not None and _files(disk.files.folder) < len(prefix.kept.tiers["disk"].book):
        if time.monotonic() > until:
            raise RuntimeError(f"pages are not on disk after {WRITE_SECONDS:.0f} s")
        time.sleep(0.01)


def _files(folder: Path) -> int:
    return sum(PAGE_FILE.fullmatch(path.name) is not None for path in folder.iterdir())


def restore(engine: EngineHere, tier: PageTier, tokens: int) -> tuple[list[Heard], int]:
    """One prompt computed, asked again from the device, and from the tier; and how many tokens of
    the last two answers differ, in themselves or their log-probabilities.
    """
    request = engine.request(tokens, ANSWER)
    heard = [ask(engine, request, f"{request.id} {turn}") for turn in ("computed", "cached")]
    evict(engine)
    heard.append(ask(engine, request, f"{request.id} restored"))
    _, cached, restored = heard
    if not cached.cached or restored.restored != {tier: cached.cached}:
        raise RuntimeError(
            f"{cached.cached} tokens were cached on the device, and then {restored.cached}, "
            f"of which {restored.restored} were restored"
        )
    pairs = zip(cached.tokens, restored.tokens, strict=True)
    return heard, sum(before != after for before, after in pairs)


def compare(model: RandomModel, args: Any, tier: PageTier, file: FigureFile) -> None:
    """All figures of a tier; the first says whether pages came back as they were."""
    dtype: Dtype = "bfloat16" if args.device == "cuda" else "float32"
    tokens = 160 if args.quick else TOKENS[tier]
    with tempfile.TemporaryDirectory(prefix="saccade-check-") as folder:
        kept = (
            PageTierConfig(host_bytes=(1 << 24) if args.quick else 2 << 30)
            if tier == "host"
            else PageTierConfig(str(Path(folder) / "kv"), 4 << 30, bytes(16))
        )
        options = EngineOptions(max_total_tokens=4 * tokens, disable_cuda_graph=True)
        engine = EngineHere(model, args.device, dtype, options=options, pages=kept)
        assert engine.scheduler.arrivals is not None
        engine.scheduler.arrivals.rates = Patient()
        try:
            rounds = [restore(engine, tier, tokens) for _ in range(ROUNDS)]
        finally:
            engine.worker.close()
    wrong, count = sum(wrong for _, wrong in rounds), ROUNDS * ANSWER
    metric = f"tokens that differ from {tier}, {tokens} before them"
    if wrong:
        raise RuntimeError(f"{metric}: {wrong} of {count}, or their log-probabilities")
    note = f"of {count}, with {ALTERNATIVES} log-probabilities each, bit for bit"
    file.add(Figure(metric, 0.0, "tokens", note=note))
    for index, way in enumerate(("computed", "cached", f"from {tier}")):
        times = sorted(heard[index].ms for heard, _ in rounds)
        note = f"longest {times[-1]:.1f}"
        file.add(Figure(f"TTFT of {tokens} tokens, {way}", times[len(times) // 2], "ms", note=note))


def crossing(device: torch.device, *, quick: bool) -> list[Figure]:
    """Pages of a 2B model saved and fetched, GB/s each way; they must be the same afterwards."""
    count, parts = (8, 4) if quick else (PAGES, LAYER_PARTS)
    pool = [
        torch.randint(0, 256, (2 * count, PART_BYTES), dtype=torch.uint8, device=device)
        for _ in range(parts)
    ]
    width, stream = parts * PART_BYTES, torch.cuda.Stream() if device.type == "cuda" else None
    host = HostPages(count * width, width, device, lambda _: pool, stream)
    names = [number.to_bytes(32, "big") for number in range(count)]
    out = [PageCopy(name, place) for place, name in enumerate(names)]
    back = [PageCopy(name, count + place) for place, name in enumerate(names)]

    def timed(work: Callable[[], None]) -> float:
        _settle(device)
        began = time.perf_counter()
        work()
        _settle(device)
        return time.perf_counter() - began

    def fetch() -> None:
        host.fetch(back)
        host.settle(names)

    saving, fetching = [], []
    for _ in range(2 if quick else 5):  # at first not all of the memory may be pinned
        saving.append(timed(partial(host.save, out)))
        for part in pool:
            part[count:] = 0
        fetching.append(timed(fetch))
        if not all(torch.equal(part[:count], part[count:]) for part in pool):
            raise RuntimeError("what came back is not what left")
        host.drop(names)
        host.collect()
    note = f"{count} pages of {width >> 10} KiB; beside `speeds`, pinned"
    return [
        Figure(
            f"KV {way} host memory", count * width / min(times) / 1e9, "GB/s", more=True, note=note
        )
        for way, times in (("to", saving), ("from", fetching))
    ]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    args = stage_arguments(__doc__)
    device, file = torch.device(args.device), FigureFile(args.figures)

    def cross() -> None:
        for figure in crossing(device, quick=args.quick):
            file.add(figure)

    file.attempt("KV to and from host memory", cross, unit="GB/s")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = make_model("tiny-qwen3-vl" if args.quick else PRESET, device, dtype)
    for tier in TOKENS:
        metric = f"evicted to {tier} and restored"
        file.attempt(metric, partial(compare, model, args, tier, file), unit="tokens")
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
