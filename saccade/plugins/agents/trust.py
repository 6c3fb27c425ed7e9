"""Counts wrong predictions for each client, to decide whether to predict at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_WRONG = 2
"""Wrong predictions after which prefill stops for a client, until a prediction is right again."""
MAX_CLIENTS = 1024
"""Maximum clients. The one with the oldest last prediction is dropped first."""


class Trust:
    """Counts each client's wrong predictions. A correct one reduces the client's count by one."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, client: Hashable) -> bool:
        return self._wrong.get(client, 0) < MAX_WRONG

    def judge(self, client: Hashable, right: bool) -> None:
        """Record whether a prediction was right."""
        wrong = self._wrong.pop(client, 0)
        self._wrong[client] = max(0, wrong - 1) if right else min(MAX_WRONG, wrong + 1)
        while len(self._wrong) > MAX_CLIENTS:
            self._wrong.popitem(last=False)
