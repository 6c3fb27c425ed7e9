"""The interface of a grammar that constrains one sequence. Plugins implement it
(`plugin.Requests.grammars`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarState(Protocol):
    """Computes which tokens a grammar allows next in one sequence, and which it forces.

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
        """Return True if the next mask will be ready soon after the current token is sampled."""
        ...

    @property
    def foresees(self) -> bool:
        """Return True if masks for draft tokens can be computed in time. Otherwise do not call
        `ahead`.
        """
        ...

    @property
    def anything(self) -> bytes:
        """Return a mask that allows every token."""
        ...

    def accept(self, token: int) -> None:
        """Advance the grammar by a token that was sampled with the mask."""
        ...

    def jump(self, planned: bool) -> tuple[int, ...]:
        """Advance by the tokens that the grammar forces next, and return them.

        planned: True if a plan in flight samples the first of these tokens.
        """
        ...

    def step(self) -> None:
        """Stop `jump` from returning forced tokens. From now on they are sampled one by one."""
        ...

    def go_on(self, planned: bool) -> None:
        """Start to compute the mask for the next token, if that token will be sampled.

        planned: True if a plan in flight samples it.
        """
        ...

    def mask(self) -> bytes:
        """Return the mask for the next token. Blocks unless `ready`."""
        ...

    def count_allowed(self, draft_tokens: Sequence[int]) -> int:
        """Return how many of the leading draft tokens the grammar allows, without side effects."""
        ...

    def ahead(self, draft_tokens: Sequence[int], jumps: bool) -> list[bytes]:
        """Return the mask after each draft token. Stop at the first one that the grammar forbids.

        jumps: True if forced tokens will be appended at once, False if they will be sampled one by
            one.
        """
        ...
