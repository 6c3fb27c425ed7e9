"""Protocols for results that a request can have in addition to its tokens, such as prompt scores or
changed logits. A row is one sequence's part of a step. Each feature is imported with the first row
that requests it.

A `StatePart` computes something from hidden states, and is implemented in plugins. A `SamplePart`
changes logits before sampling, and is implemented in `sampler.py`, `edits.py` and plugins.
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
    """Results of a step, in tensors that are copied to the host asynchronously."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def add_to(self, result: StepResult, found: Sequence[torch.Tensor]) -> StepResult:
        """Return a copy of `result` with these results added.

        found: the values of `tensors`, copied to the host.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExtraRow(Generic[Extra]):
    """A row that requests an additional result, `extra`."""

    row: int  # index in the plan
    at: int  # index of its first token in the batch
    start: int  # position of that token in the sequence
    length: int  # number of tokens
    tokens: npt.NDArray[np.int64]  # the sequence's tokens when its slot was opened
    adapter: int  # as in `Open`
    extra: Extra


class StatePart(Protocol[AnyExtra]):
    """Computes a result from hidden states, for the rows that request it. All ranks must call
    it.
    """

    def __call__(
        self, states: torch.Tensor, asking: Sequence[ExtraRow[AnyExtra]]
    ) -> RowOutcome | None:
        """Compute the results, or return None on ranks that do not report results.

        states: the hidden states of the batch, [T, hidden].
        asking: the rows that request results.
        """
        ...


def find_state_part(kind: type[RowExtra]) -> Callable[[FamilyNet, bool], StatePart[Any]]:
    """Import and return the function that creates the `StatePart` for this type of request.

    Its arguments are a network, and whether this rank reports results.
    """
    tag = kind.__struct_config__.tag
    name = next(
        name for each in plugins() for part, name in each.runtime.state_parts if part == tag
    )
    found: Callable[[FamilyNet, bool], StatePart[Any]] = resolve_name(name)
    return found


@dataclass(frozen=True, slots=True)
class Draws:
    """The D rows of a step that sample a token, and what sampling needs in addition to logits."""

    rows: Sequence[int]  # each row's slot, on the host
    counts: Sequence[int]  # for each row, how many tokens were sampled before
    slots: torch.Tensor  # [D] int64: `rows` on the device
    uniforms: torch.Tensor  # [D] float64: random numbers in [0, 1)
    # Draft tokens by the index of the row that they are the input of. Such a row is valid only if
    # the slot's previous row sampled that token.
    draft_tokens: Mapping[int, int] = field(default_factory=dict)


class SamplePart(Protocol):
    """Changes logits before sampling, for the slots that were opened with it.

    Changes may depend on the tokens that were sampled before.
    """

    def open(self, opened: Open) -> None:
        """Add the sequence in `opened`, which has its slot, its prompt and the output so far."""
        ...

    def close(self, slot: int) -> None: ...

    def edit(self, logits: torch.Tensor, draws: Draws, masked: bool, /) -> bool:
        """Change logits [D, V] in place. Return the value of `masked` for the next part.

        masked: True if some logits may already be -inf, which forbids the token.
        """
        ...

    def count(self, draws: Draws, tokens: torch.Tensor) -> None:
        """Record the sampled `tokens` [D]."""
        ...


class RowEdit(Protocol):
    """Changes the logits of one sequence."""

    def edit(self, row: torch.Tensor, count: int, masked: bool, /) -> bool:
        """Change the logits of the next token, [V], as `SamplePart.edit` does.

        count: how many tokens were sampled before.
        """
        ...

    def add_token(self, token: torch.Tensor) -> None:
        """Record the sampled `token` [1]."""
        ...
