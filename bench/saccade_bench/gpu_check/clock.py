"""Measure the time that work takes on the device without launch overhead, by capturing many calls
in one CUDA graph where possible.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]
MEASURE_MS = 150.0
"""Approximate duration of one measurement."""
GRAPH_MS = 4.0
"""Approximate duration of the calls that are captured in one graph."""
MAX_CALLS = 64
FEWEST_RUNS = 3
MAX_RUNS = 50
COLD_BYTES = 1 << 28
"""Total size of inputs that are used in turn, so that no cache holds them (an H200's L2 has 50
MiB).
"""


def copies_for(nbytes: int, device: torch.device) -> int:
    """Return how many sets of `nbytes` to use in turn, so that each is read from memory."""
    return 1 if device.type == "cpu" else max(1, min(32, -(-COLD_BYTES // nbytes)))


@torch.inference_mode()
def device_ms(works: Sequence[Work], device: torch.device, *, graph: bool = True) -> float:
    """Return the median milliseconds of one call. Calls cycle through `works`, which are captured
    in a CUDA graph if `graph`.
    """
    if device.type == "cpu":
        return _clocked(lambda: [work() for work in works], 1) / len(works)
    for work in works:  # warm up: compile, plan, allocate workspaces
        work()
    once = _clocked(lambda: [work() for work in works], 2, torch.cuda.synchronize) / len(works)
    rounds = max(1, min(int(GRAPH_MS / max(once, 1e-3)), MAX_CALLS) // len(works))
    calls = [work for _ in range(rounds) for work in works]
    run = (graph and _captured(calls)) or (lambda: [work() for work in calls])
    run()
    runs = max(FEWEST_RUNS, min(MAX_RUNS, int(MEASURE_MS / max(once * len(calls), 1e-3))))
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def _captured(calls: Sequence[Work]) -> Work | None:
    """Capture all calls and return their replay, or None if they cannot be captured."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in calls:
                work()
    except RuntimeError as error:
        print(f"not captured, so launches are timed too: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return None
    return graph.replay


def _clocked(work: Work, runs: int, settle: Work = lambda: None) -> float:
    times = []
    for _ in range(runs):
        settle()
        began = time.perf_counter()
        work()
        settle()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)
