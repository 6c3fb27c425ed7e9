"""GraphRunner: a function on tensors, captured at a few sizes and replayed at the smallest that
fits.

Owns the graphs and the choice of sizes. `eager` stands in for a capture without CUDA, so that
everything but the recording itself runs, and is tested, on a CPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import torch
from tqdm import tqdm

from saccade.kernels.reference.ops import Compile

logger = logging.getLogger(__name__)

Inputs = TypeVar("Inputs")
Replay = Callable[[], object]

ENOUGH = 64
"""Runs after which the histogram says something."""
WORTH = 0.05
"""Share of the rows computed that other sizes must save before graphs are captured anew."""
STEPS = 64
"""The histogram counts sizes in this many steps up to the largest, or fewer."""


class Graphed(Protocol[Inputs]):
    """A function over inputs with fixed shapes.

    All sizes share one set of buffers, and use parts of them.
    """

    def inputs(self, size: int) -> Inputs:
        """Return the part of the input buffers for `size`, the same memory at every call."""
        ...

    def output(self, size: int) -> torch.Tensor:
        """Return the part of the output buffer for `size`."""
        ...

    def compute(self, inputs: Inputs) -> torch.Tensor:
        """Compute the output from `inputs` and constants alone."""
        ...


class Capture(Protocol):
    """Records a function's device work. Calling the recording repeats the work."""

    def __call__(self, work: Replay) -> Replay: ...


def eager(work: Replay) -> Replay:
    """Run the work and return it in place of a recording."""
    work()
    return work


class CudaCapture:
    """Captures CUDA graphs into one memory pool, their kernels at a stream's priority.

    Capture the largest first: the rest then fit into the memory left.
    """

    def __init__(self, priority: int = 0) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # cuBLAS keeps a workspace of 32 MiB for every stream that it was ever used on.
        self._stream = torch.cuda.Stream(priority=priority)

    def __call__(self, work: Replay) -> Replay:
        # What libraries set up at first use must not happen within a capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: it first gives all memory back that PyTorch keeps, for which the
        # steps after `adapt` would pay.
        with torch.cuda.stream(self._stream):
            work()
            # Other threads may ask for events meanwhile, as NCCL's watchdog does.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


class GraphRunner(Generic[Inputs]):
    """Graphs of `graphed` at `sizes`. Their number and largest size stay within those given."""

    def __init__(
        self,
        graphed: Graphed[Inputs],
        sizes: Sequence[int],
        capture: Capture,
        progress: str | None = None,
        unit: int = 1,
        prepare: Compile | None = None,
    ) -> None:
        """Capture the graphs, the largest first.

        `progress`: the bar's name for captures. Without one there is no bar. `unit`: all sizes are
        multiples of it. `prepare`: called with the work of all sizes before the first capture.
        """
        assert sizes and min(sizes) > 0 and not any(size % unit for size in sizes)
        self._unit = unit
        self._graphed = graphed
        self._capture = capture
        self._most = len(set(sizes))
        self._graphs: dict[int, Replay] = {}
        self._wanted = sorted(set(sizes))
        self._seen: Counter[int] = Counter()
        if prepare is not None:
            prepare(lambda: [self._work(size)() for size in self._wanted])
        largest_first = reversed(self._wanted)
        if progress is not None:
            # None: not where nobody watches.
            bar = tqdm(largest_first, progress, self._most, unit="graph", disable=None)
            largest_first = iter(bar)
        for size in largest_first:
            self._add(size)

    @property
    def sizes(self) -> list[int]:
        """Return the sizes with a graph, ascending."""
        return sorted(self._graphs)

    @property
    def largest(self) -> int:
        return self._wanted[-1]

    def bucket(self, size: int) -> int | None:
        """Return the smallest graph's size for `size` rows or more, if there is one."""
        return min((captured for captured in self._graphs if captured >= size), default=None)

    def run(self, size: int, fill: Callable[[Inputs], bool]) -> torch.Tensor | None:
        """Replay the smallest graph for `size` rows or more. Returns the output, overwritten by the
        next replay.

        `fill` writes the inputs, padding included. Returns `None` if every graph is too small, or
        if `fill` returns False.
        """
        if size <= self.largest:
            self._seen[self._step(size)] += 1
        bucket = self.bucket(size)
        if bucket is None or not fill(self._graphed.inputs(bucket)):
            return None
        self._graphs[bucket]()
        return self._graphed.output(bucket)

    def adapt(self) -> bool:
        """Fit the sizes to those seen, one capture per call. Call it in idle moments.

        Returns True while more is to do.
        """
        if sum(self._seen.values()) >= ENOUGH:
            better = best_sizes(self._seen, self.largest, self._most)
            now, then = padded(self._seen, self.sizes), padded(self._seen, better)
            if then < now * (1 - WORTH):
                logger.info(
                    "graphs for sizes %s instead of %s: %.0f %% fewer rows",
                    better,
                    self.sizes,
                    100 * (1 - then / now),
                )
                self._wanted = better
            self._seen = Counter(
                {size: count // 2 for size, count in self._seen.items() if count > 1}
            )
        missing = [size for size in self._wanted if size not in self._graphs]
        if not missing:
            return False
        for size in self.sizes:
            if size not in self._wanted and len(self._graphs) >= self._most:
                del self._graphs[size]
                break
        self._add(missing[-1])
        return len(missing) > 1

    def _add(self, size: int) -> None:
        self._graphs[size] = self._capture(self._work(size))

    def _work(self, size: int) -> Replay:
        inputs, output = self._graphed.inputs(size), self._graphed.output(size)
        return lambda: output.copy_(self._graphed.compute(inputs))

    def _step(self, size: int) -> int:
        units = -(-self.largest // (STEPS * self._unit))
        step = self._unit << (units - 1).bit_length()
        return min(-(-size // step) * step, self.largest)


def padded(seen: Counter[int], sizes: Sequence[int]) -> int:
    """Count the rows computed for the sizes seen, padding included.

    Sizes above all in `sizes` run eagerly, unpadded.
    """
    return sum(
        count * min((captured for captured in sizes if captured >= size), default=size)
        for size, count in seen.items()
    )


def best_sizes(seen: Counter[int], largest: int, most: int) -> list[int]:
    """Choose at most `most` sizes, `largest` among them, that compute the fewest rows for the sizes
    seen.

    Each best size but the largest has been seen. Dynamic programming over sizes: O(n^2 most) for n
    distinct sizes.
    """
    marks = sorted({size for size in seen if size <= largest} | {largest})
    upto = list(accumulate((seen[size] for size in marks), initial=0))
    # cost[j], choice[j]: the best way found to serve everything up to marks[j], the largest size in
    # it.
    cost = [mark * upto[j + 1] for j, mark in enumerate(marks)]
    choice = [[mark] for mark in marks]
    for _ in range(most - 1):
        for j in reversed(range(len(marks))):
            for i in range(j):
                total = cost[i] + marks[j] * (upto[j + 1] - upto[i + 1])
                if total < cost[j]:
                    cost[j], choice[j] = total, [*choice[i], marks[j]]
    return choice[-1]


def begin_captures(like: torch.Tensor, priority: int = 0) -> Capture:
    """Return a recorder for graphs that are replayed one after another.

    Graphs that run at the same time, as the tower's do while the language model's run, need an own
    memory pool and workspace. priority: the kernels'.
    """
    return CudaCapture(priority) if like.is_cuda else eager
