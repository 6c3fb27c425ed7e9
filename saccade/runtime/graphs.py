"""The interface of CUDA graphs: device work that is captured once and then replayed. The GPU
backend implements it, and is imported only if the config has sizes for graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Protocol

import torch

from saccade.core.config import EncoderConfig, StepGraphSizes
from saccade.core.metrics import Metrics
from saccade.kernels.backend import find_backend
from saccade.nn.protocol import Attention, FamilyNet, GridFacts, TowerNet
from saccade.runtime.batch import Batcher, Frame

DEVICE = "cuda"
"""The device type whose backend implements graphs. Tests run its code on a CPU."""


class StepGraphs(Protocol):
    """The CUDA graphs of the language model's layers, captured for different padded shapes."""

    def frame(self, decoding: int, rows: int, tokens: int) -> Frame | None:
        """Return the smallest captured shape that fits a step, or None if the step is too large.

        decoding: the number of rows that decode.
        rows: the number of all rows.
        tokens: the number of tokens.
        """
        ...

    def capture_next(self) -> bool:
        """Capture one of the graphs that were deferred. Returns True if more are needed."""
        ...

    def run(self, frame: Frame, shown: torch.Tensor) -> torch.Tensor:
        """Replay the graph that was captured for the padded shape `frame`.

        It reads the step from the staging buffer. Returns hidden states [tokens of `frame`,
        hidden], which the next replay overwrites.

        shown: the step's image embeddings, one row per image token.
        """
        ...


class PackGraphs(Protocol):
    """The CUDA graphs of a vision encoder's blocks, captured for different numbers of patches."""

    @property
    def largest(self) -> int:
        """The number of patches in the largest graph."""
        ...

    def run(self, rows: Sequence[torch.Tensor], facts: Sequence[GridFacts]) -> torch.Tensor | None:
        """Replay a graph for images that are encoded together, or return None if no graph fits.

        Returns the vision encoder's output, which the next replay overwrites.
        """
        ...

    def adapt(self) -> bool:
        """Adapt the captured sizes to the sizes of recent images, with one capture per call.

        Call it when the worker is idle. Returns True if more captures are needed.
        """
        ...


OpenStepGraphs = Callable[
    [FamilyNet, Attention, Batcher, StepGraphSizes, torch.Tensor, Metrics], StepGraphs
]
"""Captures a network's steps at the given sizes. The tensor is an empty embedding, with the dtype
and device to use.
"""
OpenPackGraphs = Callable[[TowerNet, EncoderConfig, torch.Tensor, int], PackGraphs]
"""Captures a vision encoder at the config's sizes. The tensor is an empty embedding, and the
integer is the number of ranks on this machine.
"""


def find_step_graphs() -> OpenStepGraphs:
    """Import and return the function that captures steps of the language model."""
    backend = find_backend(DEVICE, installed=False)
    assert backend is not None and backend.step_graphs is not None, "sizes come from a backend"
    found: OpenStepGraphs = resolve_name(backend.step_graphs)
    return found


def find_pack_graphs() -> OpenPackGraphs:
    """Import and return the function that captures vision encoders."""
    backend = find_backend(DEVICE, installed=False)
    assert backend is not None and backend.pack_graphs is not None, "sizes come from a backend"
    found: OpenPackGraphs = resolve_name(backend.pack_graphs)
    return found
