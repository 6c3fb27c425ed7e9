"""Parts of a row: what a request may ask for in addition to its tokens. Each is entered by the rows
that ask, and made with the first such row.

Owns the protocols alone. Plugins have the parts for states. Those for draws are in
`sampler.py`, `edits.py` and plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.plan import Open, RowExtra, StepResult
from saccade.nn.protocol import FamilyNet
from saccade.plugins import plugins

Extra = TypeVar("Extra", bound=RowExtra, covariant=True)
AnyExtra = TypeVar("AnyExtra", bound=RowExtra, contravariant=True)


class RowOutcome(Protocol):
    """The results of a step's rows, in tensors to copy to the host."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def add_to(self, result: StepResult, found: Sequence[torch.Tensor]) -> StepResult:
        """Return the result with the tensors' values. found: the tensors, on the host."""
        ...


@dataclass(frozen=True, slots=True)
class ExtraRow(Generic[Extra]):
    """A row that asks for something."""

    row: int  # its place in the plan
    at: int  # its first batch row, for token `start`
    start: int
    length: int
    tokens: npt.NDArray[np.int64]  # those in its sequence that were known when its slot was opened
    extra: Extra


class StatePart(Protocol[AnyExtra]):
    """Computes something from a step's states, for the rows that ask. Every rank takes part."""

    def __call__(
        self, states: torch.Tensor, asking: Sequence[ExtraRow[AnyExtra]]
    ) -> RowOutcome | None:
        """Compute from the batch's states, [T, hidden].

        Only ranks that keep results return them.
        """
        ...


def find_state_part(kind: type[RowExtra]) -> Callable[[FamilyNet, bool], StatePart[Any]]:
    """Import what computes what such rows ask for: of a network, and whether this rank keeps it."""
    tag = kind.__struct_config__.tag
    name = next(name for each in plugins() for part, name in each.state_parts if part == tag)
    found: Callable[[FamilyNet, bool], StatePart[Any]] = resolve_name(name)
    return found


@dataclass(frozen=True, slots=True)
class Draws:
    """The D rows that draw in a step, known before the logits."""

    rows: Sequence[int]  # slots, for the host
    counts: Sequence[int]  # tokens sampled before, by row
    slots: torch.Tensor  # [D] int64
    uniforms: torch.Tensor  # [D] float64
    # the draft tokens, by place. Such a row counts only if the slot's row before drew that token.
    draft_tokens: Mapping[int, int] = field(default_factory=dict)


class SamplePart(Protocol):
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
        """Change the next token's logits [V], as `SamplePart.edit` does.

        count: tokens sampled before.
        """
        ...

    def add_token(self, token: torch.Tensor) -> None:
        """Take in the drawn `token` [1]."""
        ...
