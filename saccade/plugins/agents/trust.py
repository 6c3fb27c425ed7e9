"""How far predictions about a client are trusted. Owns a count of wrong ones for each, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_WRONG = 2
"""Wrong predictions after which nothing is prepared for a client, until one is right again."""
MAX_CLIENTS = 1024
"""Those judged the longest ago are forgotten first."""


class Trust:
    """Counts wrong predictions by client. One that is right takes one back."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, client: Hashable) -> bool:
        return self._wrong.get(client, 0) < MAX_WRONG

    def judge(self, client: Hashable, right: bool) -> None:
        """Count a prediction."""
        wrong = self._wrong.pop(client, 0)
        self._wrong[client] = max(0, wrong - 1) if right else min(MAX_WRONG, wrong + 1)
        while len(self._wrong) > MAX_CLIENTS:
            self._wrong.popitem(last=False)
