"""Questions to the engine beside requests: changes of the weights, and pauses.

Owns the questions that await their answer. One event loop, without locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Literal

from saccade.core.errors import EngineUnavailable, InvalidRequest
from saccade.core.plan import Change, Changed, Memory
from saccade.ipc.messages import Alter, Altered, Pause, Resume, ToEngine

PauseMode = Literal["abort", "wait", "keep"]


class EngineChanges:
    """Ask the engine for changes that concern all requests. `tell` raises EngineUnavailable."""

    def __init__(self, tell: Callable[[ToEngine], None]) -> None:
        self.paused = False  # a pause was asked for and has yet to end
        self.asleep: Sequence[Memory] = ()  # the memory given back
        self._tell = tell
        self._ids = count(1)
        self._asked: dict[int, asyncio.Future[Changed]] = {}

    def request_change(self, change: Change) -> asyncio.Future[Changed]:
        id = next(self._ids)
        return self._say(id, Alter(id, change))

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine and return once it computes nothing.

        abort: requests in flight end with an error; wait: answered first; keep: continued after the
        pause.
        """
        id = next(self._ids)
        self.paused = True
        await self._say(id, Pause(id, mode))

    async def resume(self) -> None:
        """Resume, and return once requests are computed again. Raises InvalidRequest."""
        if self.asleep:
            raise InvalidRequest(
                f"asleep ({', '.join(self.asleep)}): wake the server first (POST /wake_up)"
            )
        id = next(self._ids)
        self.paused = False
        await self._say(id, Resume(id))

    async def update_weights(self, folder: str) -> bool:
        """Switch to the checkpoint in `folder`. Returns True if image embeddings stay valid. The
        engine is paused. Raises InvalidRequest.
        """
        changed = await self.request_change(Change("weights", folder=folder))
        self._heed(changed)
        if changed.error:
            raise InvalidRequest(changed.error, "model_path", "weights_unchanged")
        return not changed.tower

    async def sleep(
        self, memory: Sequence[Memory], mode: PauseMode, *, lightly: bool = False
    ) -> None:
        """Pause the engine and give memory back. lightly: only the weights on an accelerator.

        Raises InvalidRequest, before it has ended any request.
        """
        trial = Change("may sleep", memory=tuple(memory), lightly=lightly)
        changed = await self.request_change(trial)
        if not changed.error:
            before = self.paused
            await self.pause(mode)
            changed = await self.request_change(replace(trial, kind="sleep"))
            self._heed(changed)
            if changed.error and not before:
                await self.resume()
        if changed.error:
            raise InvalidRequest(changed.error, None, "cannot_sleep")

    async def wake(self, memory: Sequence[Memory]) -> bool:
        """Take memory again, and end the pause once the engine holds all of it. Returns True if
        image embeddings stay valid. Raises InvalidRequest.
        """
        changed = Changed()
        if self.asleep:
            changed = await self.request_change(Change("wake", memory=tuple(memory)))
            self._heed(changed)
        if changed.error:
            raise InvalidRequest(changed.error, None, "cannot_wake")
        if not self.asleep:
            await self.resume()
        return not changed.tower

    def _heed(self, changed: Changed) -> None:
        self.asleep = changed.asleep

    def hear(self, altered: Altered) -> None:
        """Pass the engine's answer to whoever waits for it."""
        waiting = self._asked.pop(altered.id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(altered.changed)

    def fail(self, reason: str) -> None:
        """Fail every wait with EngineUnavailable: the engine has stopped answering."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(reason))
                waiting.exception()  # perhaps nobody waits for it
        self._asked.clear()

    def _say(self, id: int, message: ToEngine) -> asyncio.Future[Changed]:
        self._tell(message)
        self._asked[id] = asyncio.get_running_loop().create_future()
        return self._asked[id]
