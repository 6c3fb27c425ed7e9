"""What a worker knows of graphs, device work that is captured once and replayed. A backend for GPUs
makes them, and is imported where a config has sizes for graphs.
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
"""Whose backend makes graphs. Tests replay them on a CPU."""


class StepGraphs(Protocol):
    """The language model's layers, captured at a few frames."""

    def frame(self, decoding: int, rows: int, tokens: int) -> Frame | None:
        """Return the smallest frame for `rows` rows and `tokens` tokens, `decoding` of the rows
        decoding.

        Returns `None` if the step is too large for all.
        """
        ...

    def run(self, frame: Frame, shown: torch.Tensor) -> torch.Tensor:
        """Replay the graph for `frame` and return its states [tokens of the frame, hidden].

        They belong to the staged step, padded, and the next replay overwrites them. shown: the
        step's image rows.
        """
        ...


class PackGraphs(Protocol):
    """A vision tower's blocks, captured at a few numbers of patches."""

    @property
    def largest(self) -> int:
        """Return the most patches of a graph."""
        ...

    def run(self, rows: Sequence[torch.Tensor], facts: Sequence[GridFacts]) -> torch.Tensor | None:
        """Replay a graph for a pack of images, and return the tower's output, which the next replay
        overwrites. Returns `None` if no graph fits.
        """
        ...

    def adapt(self) -> bool:
        """Fit the sizes to those seen, one capture per call. Call it in idle moments.

        Returns True while more is to do.
        """
        ...


OpenStepGraphs = Callable[
    [FamilyNet, Attention, Batcher, StepGraphSizes, torch.Tensor, Metrics], StepGraphs
]
"""Captures a network's steps at some sizes. The tensor is like embeddings."""
OpenPackGraphs = Callable[[TowerNet, EncoderConfig, torch.Tensor, int], PackGraphs]
"""Captures a tower at a config's sizes. The tensor is like embeddings; the number is of the ranks
on this machine.
"""


def find_step_graphs() -> OpenStepGraphs:
    """Return what captures steps."""
    backend = find_backend(DEVICE, installed=False)
    assert backend is not None and backend.step_graphs is not None, "sizes come from a backend"
    found: OpenStepGraphs = resolve_name(backend.step_graphs)
    return found


def find_pack_graphs() -> OpenPackGraphs:
    """Return what captures vision encoders."""
    backend = find_backend(DEVICE, installed=False)
    assert backend is not None and backend.pack_graphs is not None, "sizes come from a backend"
    found: OpenPackGraphs = resolve_name(backend.pack_graphs)
    return found
