"""Captures steps as CUDA graphs: the language model's layers, for a few padded batch shapes
(`Frame`).

This module selects the graph for a step. It stores the inputs of graphs other than the batcher's
staging buffer, their output, and the count of replays. A graph covers a whole step, including
attention, which reads lengths and pages on the device. The choice depends only on a plan's numbers
of rows and tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from saccade.core.config import StepGraphSizes
from saccade.core.metrics import Metrics
from saccade.nn.protocol import Attention, Batch, FamilyNet
from saccade.plugins.gpu.cuda.graphs import Capture, GraphRunner, begin_captures
from saccade.runtime.batch import ROW_TOKENS, Batcher, Frame
from saccade.runtime.vision.streams import FIRST


class StepMemory:
    """What all step graphs share: the function to capture, and the buffers for image embeddings
    (`embeddings`) and for output states.
    """

    def __init__(
        self,
        net: FamilyNet,
        attention: Attention,
        batcher: Batcher,
        sizes: StepGraphSizes,
        like: torch.Tensor,
    ) -> None:
        """Allocate the buffers.

        like: a tensor of embeddings, whose dtype, device and width are used.
        """
        most = max((0, *sizes.mixed_tokens))
        self.batcher = batcher
        self.states = like.new_zeros((max((0, *sizes.rows, sizes.most_tokens)), net.hidden))
        self.embeddings = like.new_zeros((most, like.shape[1]))
        self._net = net
        self._attention = attention

    def compute(self, batch: Batch) -> torch.Tensor:
        self._attention.plan(batch)
        return self._net.forward(batch, self._attention)


class FrameBuffers:
    """The inputs and output of graphs for one kind of padded shape, in which a size identifies each
    shape.

    Implements `graphs.Graphed`.
    """

    def __init__(self, memory: StepMemory, frame: Callable[[int], Frame]) -> None:
        self._memory = memory
        self._frame = frame
        self._inputs: dict[int, Batch] = {}

    def inputs(self, size: int) -> Batch:
        """Return the batch of a padded shape. In the first call, the staging buffer contains only
        padding.
        """
        if size not in self._inputs:
            frame, memory = self._frame(size), self._memory
            shown = memory.embeddings[: frame.splices]
            self._inputs[size] = replace(memory.batcher.idle(frame), embeddings=shown)
        return self._inputs[size]

    def output(self, size: int) -> torch.Tensor:
        return self._memory.states[: self._frame(size).tokens]

    def compute(self, inputs: Batch) -> torch.Tensor:
        return self._memory.compute(inputs)


class CapturedSteps:
    """Replays the CUDA graphs of steps, which the constructor captures.

    If `sizes.defer`, it captures only the largest graph for steps with prompts, and `capture_next`
    captures the others.
    """

    def __init__(
        self, memory: StepMemory, sizes: StepGraphSizes, capture: Capture, metrics: Metrics
    ) -> None:
        self._metrics = metrics
        # By the number of decoding rows in a mixed step. The largest is captured first, so that the
        # others fit into its memory.
        self._mixed = {
            singles: GraphRunner(
                FrameBuffers(memory, partial(Frame.mixed, singles)),
                sizes.mixed_tokens,
                capture,
                f"graphs of prompts beside {singles} rows",
                defer=sizes.defer,
            )
            for singles in sorted(sizes.mixed_rows, reverse=True)
            if sizes.mixed_tokens
        }
        self._decode = (
            GraphRunner(FrameBuffers(memory, Frame.decode), sizes.rows, capture, "decode graphs")
            if sizes.rows
            else None
        )

    def frame(self, decoding: int, rows: int, tokens: int) -> Frame | None:
        """Return the smallest captured shape for `rows` rows and `tokens` tokens, where `decoding`
        of the rows decode.

        Returns `None` if the step is too large for all shapes, or its graph has not been captured
        yet.
        """
        if decoding == rows:
            bucket = self._decode.bucket(rows) if self._decode else None
            return None if bucket is None else Frame.decode(bucket)
        singles = min((each for each in self._mixed if each >= decoding), default=None)
        if singles is None:
            return None
        least = max(tokens - decoding + 1, (rows - decoding) * ROW_TOKENS)
        bucket = self._mixed[singles].bucket(least)
        return None if bucket is None else Frame.mixed(singles, bucket)

    def capture_next(self) -> bool:
        missing = [runner for runner in self._mixed.values() if runner.missing]
        return bool(missing) and (missing[0].capture_next() or len(missing) > 1)

    def run(self, frame: Frame, shown: torch.Tensor) -> torch.Tensor:
        """Replay the graph for `frame` and return its states [tokens of `frame`, hidden].

        The states are those of the staged step, with padding. The next replay overwrites them.

        shown: the embeddings of the step's images.
        """

        def fill(inputs: Batch) -> bool:
            if len(shown):
                inputs.embeddings[: len(shown)].copy_(shown)
            return True

        if frame.splices:
            states = self._mixed[frame.singles].run(frame.tokens - frame.singles, fill)
            self._metrics.inc("saccade_mixed_graph_replays_total", tokens=str(frame.tokens))
        else:
            assert self._decode is not None
            states = self._decode.run(frame.rows, fill)
            self._metrics.inc("saccade_graph_replays_total", rows=str(frame.rows))
        assert states is not None, "the step was padded to a graph"
        return states


@torch.inference_mode()
def open_step_graphs(
    net: FamilyNet,
    attention: Attention,
    batcher: Batcher,
    sizes: StepGraphSizes,
    like: torch.Tensor,
    metrics: Metrics,
) -> CapturedSteps:
    """Capture the graphs for steps. Implements `runtime.graphs.OpenStepGraphs`."""
    memory = StepMemory(net, attention, batcher, sizes, like)
    return CapturedSteps(memory, sizes, begin_captures(like, FIRST), metrics)
