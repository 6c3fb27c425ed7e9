"""Captures the vision encoder's blocks as CUDA graphs for a few numbers of patches, and owns the
buffers that the graphs read and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from saccade.core.config import EncoderConfig
from saccade.kernels.reference.segments import Segments
from saccade.nn.protocol import Cut, GridFacts, Pack, TowerNet, VisionNet
from saccade.plugins.gpu.cuda.graphs import Capture, GraphRunner, begin_captures
from saccade.runtime.vision.packed_encoder import drain

ROWS_PER_SEGMENT = 16
"""Rows of a graph per segment: a graph for N rows has space for N / 16 segments of each kind, plus
8. Packs with more segments run eagerly.
"""
MAX_UNBOUNDED = 32
"""Maximum number of segments that may be as long as the graph. Each of them launches blocks for N
rows, most of which have no work.
"""


class CapturedPacks:
    """Replays the encoder's graphs at the sizes of a config. Implements
    `runtime.graphs.PackGraphs`.
    """

    def __init__(
        self,
        net: TowerNet,
        config: EncoderConfig,
        like: torch.Tensor,
        ranks: int = 1,
        capture: Capture | None = None,
    ) -> None:
        """Capture the graphs, or only the largest one if `config.defer_graphs`.

        ranks: the number of ranks on this machine.
        capture: captures a graph. By default, it is the device's.
        """
        self._buffers = PackBuffers(net, max(config.graph_sizes), config, like)
        self._runner = GraphRunner(
            self._buffers,
            config.graph_sizes,
            capture or begin_captures(like),
            unit=net.spec.patch_unit,
            prepare=net.ops.compiler(like.device, ranks),
            defer=config.defer_graphs,
        )

    @property
    def largest(self) -> int:
        return self._runner.largest

    def run(self, rows: Sequence[torch.Tensor], facts: Sequence[GridFacts]) -> torch.Tensor | None:
        # Fill the buffers only just before a replay because all packs share them.
        return self._runner.run(
            sum(map(len, rows)), lambda inputs: self._buffers.fill(inputs, rows, facts)
        )

    def adapt(self) -> bool:
        return self._runner.adapt()


class PackBuffers:
    """Inputs and output of the encoder's graphs, for packs of up to `largest` rows. Implements
    `graphs.Graphed`.

    Padding rows attend only to each other, in separate segments.
    """

    def __init__(
        self, net: TowerNet, largest: int, config: EncoderConfig, like: torch.Tensor
    ) -> None:
        self._vision: VisionNet = net.vision
        self._attention = net.ops.towers[config.attention]
        self._rows = like.new_zeros((largest, net.vision.hidden))
        self._places = torch.zeros(
            (net.vision.axes, largest), dtype=torch.int64, device=like.device
        )
        self._output = like.new_zeros((net.vision.rows(largest), net.spec.embedding_width))
        # A captured graph keeps the address of its bounds, so each size has its own tensor.
        self._inputs: dict[int, Pack] = {}

    def inputs(self, size: int) -> Pack:
        if size not in self._inputs:
            whole = slice(0, size)
            cuts = tuple(
                (Cut(whole, whole, self._segments(size, limit)),)
                for limit in self._vision.longest_segments
            )
            self._inputs[size] = Pack(
                self._rows[:size], self._places[:, :size], cuts, self._attention
            )
        return self._inputs[size]

    def _segments(self, size: int, limit: int | None) -> Segments:
        longest = min(size, limit or size)
        bounds = segment_bounds([], size, segments_that_fit(size, limit), longest)
        assert bounds is not None
        return Segments(bounds.to(self._rows.device), longest)

    def output(self, size: int) -> torch.Tensor:
        return self._output[: self._vision.rows(size)]

    def compute(self, inputs: Pack) -> torch.Tensor:
        return drain(self._vision.blocks(inputs))

    def fill(self, inputs: Pack, rows: Sequence[torch.Tensor], facts: Sequence[GridFacts]) -> bool:
        """Write a pack of images and its padding to the inputs.

        Returns False if the pack has more segments than fit.
        """
        found = []
        whole = [cut.segments for (cut,) in inputs.cuts]
        for segments, kind in zip(whole, zip(*(fact.segments for fact in facts))):
            lengths = [length for each in kind for length in each]
            bounds = segment_bounds(
                lengths, len(inputs.rows), len(segments.bounds) - 1, segments.longest
            )
            if bounds is None:
                return False
            found.append(bounds)
        for segments, bounds in zip(whole, found):
            source = bounds.pin_memory() if segments.bounds.is_cuda else bounds
            segments.bounds.copy_(source, non_blocking=True)
        start = 0
        for patches, fact in zip(rows, facts):
            inputs.rows[start : start + len(patches)] = patches
            inputs.places[:, start : start + len(patches)] = fact.places
            start += len(patches)
        inputs.rows[start:] = 0
        inputs.places[:, start:] = 0
        return True


def segments_that_fit(size: int, limit: int | None) -> int:
    """Return how many segments fit into a graph for `size` rows.

    limit: the maximum rows of a segment.
    """
    most = size // ROWS_PER_SEGMENT + 8
    return most if limit else min(most, MAX_UNBOUNDED)


def segment_bounds(
    lengths: Sequence[int], size: int, room: int, longest: int
) -> torch.Tensor | None:
    """Return the bounds [room + 1], int32, of segments that fill `size` rows.

    The first segments have the lengths `lengths`. Segments of padding, of at most `longest` rows
    each, and then empty segments follow. Returns `None` if there are more segments than fit.
    """
    used = sum(lengths)
    padding = [min(longest, size - at) for at in range(used, size, longest)]
    if len(lengths) + len(padding) > room:
        return None
    bounds = np.full(room + 1, size, np.int32)
    bounds[: len(lengths) + 1] = list(accumulate(lengths, initial=0))
    bounds[len(lengths) + 1 : len(lengths) + len(padding) + 1] = used + np.cumsum(padding)
    return torch.from_numpy(bounds)
