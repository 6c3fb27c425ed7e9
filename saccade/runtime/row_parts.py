"""Parts of a row: what a request may ask of its rows beside their tokens. Each is entered by the
rows that ask, and made with the first of them.

Owns the protocols alone. The parts are in `scores.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.plan import RowExtra, StepResult

Extra = TypeVar("Extra", bound=RowExtra, covariant=True)
AnyExtra = TypeVar("AnyExtra", bound=RowExtra, contravariant=True)


class Outcome(Protocol):
    """What came of a step's rows, in tensors that cross to the host."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def tell(self, result: StepResult, found: Sequence[torch.Tensor]) -> StepResult:
        """Return the result with what the tensors say. found: the tensors, on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Asking(Generic[Extra]):
    """A row that asks for something. row: its place in the plan. at: its first batch row, of token
    `start`. tokens: those of its sequence that were told when its slot was opened.
    """

    row: int
    at: int
    start: int
    length: int
    tokens: npt.NDArray[np.int64]
    extra: Extra


class StatePart(Protocol[AnyExtra]):
    """Computes something of a step's states, for the rows that ask. Every rank takes part."""

    def __call__(self, states: torch.Tensor, asking: Sequence[Asking[AnyExtra]]) -> Outcome | None:
        """states: of the batch, [T, hidden]. None on ranks that keep no results."""
        ...
