"""Parts of a row: what a request may ask of its rows beside their tokens. Each is entered by the
rows that ask, and made with the first of them.

Owns the protocols alone. Parts of states are in `scores.py`, those of draws in `draw_parts.py`, of
`edits.py` and `token_rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.plan import Open, RowExtra, StepResult

Extra = TypeVar("Extra", bound=RowExtra, covariant=True)
AnyExtra = TypeVar("AnyExtra", bound=RowExtra, contravariant=True)


class RowOutcome(Protocol):
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

    def __call__(
        self, states: torch.Tensor, asking: Sequence[Asking[AnyExtra]]
    ) -> RowOutcome | None:
        """states: of the batch, [T, hidden]. None on ranks that keep no results."""
        ...


@dataclass(frozen=True, slots=True)
class Draws:
    """The D rows of a step with a draw, known before the logits.

    counts: tokens drawn before, by row. guesses: by place, those of rows that count only if the
    row before of their slot drew that token.
    """

    rows: Sequence[int]  # slots, for the host
    counts: Sequence[int]
    slots: torch.Tensor  # [D] int64
    uniforms: torch.Tensor  # [D] float64
    guesses: Mapping[int, int] = field(default_factory=dict)


class DrawPart(Protocol):
    """Changes logits before the draw, by what was drawn before, in the slots opened for it."""

    def open(self, opened: Open) -> None:
        """A sequence that asks for it enters a slot: its prompt, and the answer so far."""
        ...

    def close(self, slot: int) -> None: ...

    def edit(self, logits: torch.Tensor, draws: Draws, masked: bool, /) -> bool:
        """Change logits [D, V] in place. masked: some tokens are forbidden (-inf). Return whether
        some are from now on.
        """
        ...

    def count(self, draws: Draws, tokens: torch.Tensor) -> None:
        """`tokens` [D] were drawn."""
        ...


class RowEdit(Protocol):
    """What changes the logits of one sequence."""

    def edit(self, row: torch.Tensor, count: int, masked: bool, /) -> bool:
        """As `DrawPart`'s, of the logits [V] of the sequence's next token. count: drawn before."""
        ...

    def add(self, token: torch.Tensor) -> None:
        """`token` [1] was drawn."""
        ...
