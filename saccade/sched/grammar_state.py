"""The interface between the scheduler and the grammar of one sequence. Plugins implement it
(`plugin.Requests.grammars`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarState(Protocol):
    """The tokens that a grammar allows next in one sequence, and those that it forces.

    Methods raise InvalidRequest if the grammar has become too complex.
    """

    @property
    def must_end(self) -> bool:
        """Return True if the output is complete, and generation must end."""
        ...

    @property
    def ready(self) -> bool:
        """Return True if the mask for the next token is ready."""
        ...

    @property
    def quick(self) -> bool:
        """Return True if the next mask is ready soon after the current token is sampled."""
        ...

    @property
    def foresees(self) -> bool:
        """Return True if masks for draft tokens can be computed in time, so that `ahead` may be
        called.
        """
        ...

    @property
    def anything(self) -> bytes:
        """A mask that allows every token."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a token that was sampled with the mask."""
        ...

    def jump(self, planned: bool) -> tuple[int, ...]:
        """Advance by the forced tokens and return them. planned: a plan in flight samples the first
        of them.
        """
        ...

    def step(self) -> None:
        """Have forced tokens sampled one by one from now on, instead of returned by `jump`."""
        ...

    def go_on(self, planned: bool) -> None:
        """Start to compute the mask for the next token, if one is sampled. planned: by a plan in
        flight.
        """
        ...

    def mask(self) -> bytes:
        """Return the mask for the next token. Blocks unless `ready`."""
        ...

    def count_allowed(self, draft_tokens: Sequence[int]) -> int:
        """Return how many of the leading draft tokens the grammar allows, without side effects."""
        ...

    def ahead(self, draft_tokens: Sequence[int], jumps: bool) -> list[bytes]:
        """Return the mask after each draft token, up to the first token that the grammar does not
        allow.

        jumps: True if forced tokens will be appended at once, False if they will be sampled one by
            one.
        """
        ...
