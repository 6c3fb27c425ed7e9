"""The contract between the scheduler and a sequence whose answer is held to a grammar.

A plugin implements grammars (`Plugin.grammars`). This module only has types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarState(Protocol):
    """Which tokens are allowed next in one sequence, and which are forced.

    Methods raise InvalidRequest when the grammar has become too complex to follow.
    """

    @property
    def must_end(self) -> bool:
        """Return True if the answer is complete and must end here."""
        ...

    @property
    def ready(self) -> bool:
        """Return True if the mask for the next token is ready."""
        ...

    @property
    def quick(self) -> bool:
        """Return True if the mask will be ready soon after the token before."""
        ...

    @property
    def foresees(self) -> bool:
        """Return True if `ahead` may be called: masks after draft tokens are computed in time."""
        ...

    @property
    def anything(self) -> bytes:
        """A mask that allows every token."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a token sampled under the mask."""
        ...

    def jump(self, planned: bool) -> tuple[int, ...]:
        """Take the forced tokens. `planned`: a plan in flight samples the first of them."""
        ...

    def step(self) -> None:
        """Sample forced tokens one by one from now on."""
        ...

    def go_on(self, planned: bool) -> None:
        """Make the mask for the next token, if one is sampled. `planned`: by a plan in flight."""
        ...

    def mask(self) -> bytes:
        """Return the mask for the next token. Waits unless `ready`."""
        ...

    def count_allowed(self, draft_tokens: Sequence[int]) -> int:
        """Count the leading draft tokens that the grammar allows, without side effects."""
        ...

    def ahead(self, draft_tokens: Sequence[int], jumps: bool) -> list[bytes]:
        """Return the masks behind each draft token, up to the first impossible one.

        jumps: forced tokens will be taken at once, else one by one.
        """
        ...
