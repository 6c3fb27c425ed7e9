"""Parts of a row: what a request may ask for in addition to its tokens. Each is entered by the rows
that ask, and made with the first such row.

Owns the protocols alone. Parts for states are in `scores.py`. Those for draws are in
`draw_parts.py`, `edits.py` and `token_rules.py`.
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
    """What a step's rows came to, in tensors that cross to the host."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def add_to(self, result: StepResult, found: Sequence[torch.Tensor]) -> StepResult:
        """Return the result with what the tensors say. found: the tensors, on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Asking(Generic[Extra]):
    """A row that asks for something.

    row: its place in the plan. at: its first batch row, for token `start`. tokens: those in its
    sequence that were known when its slot was opened.
    """

    row: int
    at: int
    start: int
    length: int
    tokens: npt.NDArray[np.int64]
    extra: Extra


class StatePart(Protocol[AnyExtra]):
    """Computes something from a step's states, for the rows that ask. Every rank takes part."""

    def __call__(
        self, states: torch.Tensor, asking: Sequence[Asking[AnyExtra]]
    ) -> RowOutcome | None:
        """Compute from the batch's states, [T, hidden].

        Only ranks that keep results return them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Draws:
    """The D rows that draw in a step, known before the logits.

    counts: tokens drawn before, by row. draft_tokens: the draft tokens, by place. Such a row counts
    only if the slot's row before drew that token.
    """

    rows: Sequence[int]  # slots, for the host
    counts: Sequence[int]
    slots: torch.Tensor  # [D] int64
    uniforms: torch.Tensor  # [D] float64
    draft_tokens: Mapping[int, int] = field(default_factory=dict)


class DrawPart(Protocol):
    """Changes logits before the draw, by what was drawn before, in the slots opened for it."""

    def open(self, opened: Open) -> None:
        """Open a slot for a sequence that asks for this part, with its prompt and the answer so
        far.
        """
        ...

    def close(self, slot: int) -> None: ...

    def edit(self, logits: torch.Tensor, draws: Draws, masked: bool, /) -> bool:
        """Change logits [D, V] in place. Returns whether some tokens are forbidden from now on.

        masked: some tokens are forbidden (-inf) already.
        """
        ...

    def count(self, draws: Draws, tokens: torch.Tensor) -> None:
        """Take in the drawn `tokens` [D]."""
        ...


class RowEdit(Protocol):
    """Changes one sequence's logits."""

    def edit(self, row: torch.Tensor, count: int, masked: bool, /) -> bool:
        """Change the next token's logits [V], as `DrawPart.edit` does.

        count: tokens drawn before.
        """
        ...

    def add_token(self, token: torch.Tensor) -> None:
        """Take in the drawn `token` [1]."""
        ...
