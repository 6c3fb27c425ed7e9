"""Captures a function of tensors as graphs for a few sizes, and replays the smallest graph that
fits.

This module stores the graphs and chooses their sizes. Without CUDA, `eager` replaces the capture,
so that everything else runs, and is tested, on a CPU.
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
"""Minimum number of runs before the histogram of sizes is evaluated."""
WORTH = 0.05
"""Fraction of the computed rows that other sizes must save before graphs are captured again."""
MISSES = 4
"""A missing graph is captured at the latest after this many runs that needed it, so that a server
which is never idle captures it, too.
"""
STEPS = 64
"""Maximum number of buckets in the histogram of sizes."""


class Graphed(Protocol[Inputs]):
    """A function whose inputs have a fixed shape for each size.

    All sizes share one set of buffers, and use slices of them.
    """

    def inputs(self, size: int) -> Inputs:
        """Return the slice of the input buffers for `size`, at the same address in every call."""
        ...

    def output(self, size: int) -> torch.Tensor:
        """Return the slice of the output buffer for `size`, at the same address in every call."""
        ...

    def compute(self, inputs: Inputs) -> torch.Tensor:
        """Compute the output from `inputs` and constants only."""
        ...


class Capture(Protocol):
    """Captures the device work of a function. Calling the result replays it."""

    def __call__(self, work: Replay) -> Replay: ...


def eager(work: Replay) -> Replay:
    """Run the function once, and return it. Used instead of a graph without CUDA."""
    work()
    return work


class CudaCapture:
    """Captures CUDA graphs into one memory pool. Their kernels have the priority of a stream.

    Capture the largest graph first, so that the others fit into the memory that it has allocated.
    """

    def __init__(self, priority: int = 0) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: cuBLAS keeps a 32 MiB workspace for each stream it has used.
        self._stream = torch.cuda.Stream(priority=priority)

    def __call__(self, work: Replay) -> Replay:
        # Libraries must do their lazy initialization before the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would first empty PyTorch's memory cache, which would slow down the
        # steps after `adapt`.
        with torch.cuda.stream(self._stream):
            work()
            # Other threads may query events meanwhile, as NCCL's watchdog does.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


class GraphRunner(Generic[Inputs]):
    """Replays graphs of `graphed`, which are captured at `sizes`. A size without a graph runs
    eagerly.

    `adapt` may choose other sizes, but not more or larger ones.
    """

    def __init__(
        self,
        graphed: Graphed[Inputs],
        sizes: Sequence[int],
        capture: Capture,
        progress: str | None = None,
        unit: int = 1,
        prepare: Compile | None = None,
        *,
        defer: bool = False,
    ) -> None:
        """Capture the graphs, the largest first.

        `progress`: the title of a progress bar. By default, there is none.
        `unit`: all sizes are multiples of it.
        `prepare`: called with the work of all sizes before the first capture.
        `defer`: capture only the largest graph now, and the others in `capture_next`.
        """
        assert sizes and min(sizes) > 0 and not any(size % unit for size in sizes)
        self._unit = unit
        self._graphed = graphed
        self._capture = capture
        self._most = len(set(sizes))
        self._graphs: dict[int, Replay] = {}
        self._wanted = sorted(set(sizes))
        self._seen: Counter[int] = Counter()
        self._missed: Counter[int] = Counter()
        if prepare is not None:
            prepare(lambda: [self._work(size)() for size in self._wanted])
        largest_first = self._wanted[-1:] if defer else self._wanted[::-1]
        # `disable=None` hides the bar if stderr is not a terminal.
        hidden = True if progress is None else None
        for size in tqdm(largest_first, progress, unit="graph", disable=hidden):
            self._add(size)

    @property
    def sizes(self) -> list[int]:
        """The sizes with a graph, ascending."""
        return sorted(self._graphs)

    @property
    def largest(self) -> int:
        return self._wanted[-1]

    @property
    def missing(self) -> list[int]:
        """The sizes whose graphs have not been captured yet, ascending."""
        return [size for size in self._wanted if size not in self._graphs]

    def bucket(self, size: int) -> int | None:
        """Return the size of the smallest graph for at least `size` rows, or `None` if there is
        none.

        If this graph has not been captured yet, the call is counted, and the graph is captured
        after `MISSES` calls.
        """
        fits = (each for each in {*self._graphs, *self._wanted} if each >= size)
        best = min(fits, default=None)
        if best is None or best in self._graphs:
            return best
        self._missed[best] += 1
        if self._missed[best] <= MISSES:
            return None
        self._add(best)
        return best

    def run(self, size: int, fill: Callable[[Inputs], bool]) -> torch.Tensor | None:
        """Replay the smallest graph for at least `size` rows. The next replay overwrites the
        output.

        `fill` writes the inputs, including padding. Returns `None` if all graphs are too small, if
        the one that fits has not been captured yet, or if `fill` returns False.
        """
        if size <= self.largest:
            self._seen[self._step(size)] += 1
        bucket = self.bucket(size)
        if bucket is None or not fill(self._graphed.inputs(bucket)):
            return None
        self._graphs[bucket]()
        return self._graphed.output(bucket)

    def adapt(self) -> bool:
        """Choose sizes that suit the recent runs, and capture the graphs for them, one per call.
        Call this when idle.

        Returns True if more graphs have to be captured.
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
        return self.capture_next()

    def capture_next(self) -> bool:
        """Capture the largest size that has no graph. Returns True if others remain."""
        if self.missing:
            self._add(self.missing[-1])
        return bool(self.missing)

    def _add(self, size: int) -> None:
        unused = (each for each in self.sizes if each not in self._wanted)
        if len(self._graphs) >= self._most and (old := next(unused, None)) is not None:
            del self._graphs[old]
        self._graphs[size] = self._capture(self._work(size))

    def _work(self, size: int) -> Replay:
        inputs, output = self._graphed.inputs(size), self._graphed.output(size)
        return lambda: output.copy_(self._graphed.compute(inputs))

    def _step(self, size: int) -> int:
        units = -(-self.largest // (STEPS * self._unit))
        step = self._unit << (units - 1).bit_length()
        return min(-(-size // step) * step, self.largest)


def padded(seen: Counter[int], sizes: Sequence[int]) -> int:
    """Return the number of rows computed for the sizes in `seen`, including padding.

    Sizes above all of `sizes` run eagerly, without padding.
    """
    return sum(
        count * min((captured for captured in sizes if captured >= size), default=size)
        for size, count in seen.items()
    )


def best_sizes(seen: Counter[int], largest: int, most: int) -> list[int]:
    """Return at most `most` sizes, including `largest`, that minimize the rows computed for the
    sizes in `seen`.

    All returned sizes except `largest` are in `seen`. Uses dynamic programming over sizes: O(n^2
    most) for n distinct sizes.
    """
    marks = sorted({size for size in seen if size <= largest} | {largest})
    upto = list(accumulate((seen[size] for size in marks), initial=0))
    # cost[j], choice[j]: the best way to cover all sizes up to marks[j] if marks[j] is the largest
    # size chosen.
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
    """Return a function that captures graphs, which are replayed one at a time.

    priority: the priority of the kernels.

    Graphs that may run concurrently, such as those of the vision encoder and of the language model,
    need separate memory pools and workspaces.
    """
    return CudaCapture(priority) if like.is_cuda else eager
