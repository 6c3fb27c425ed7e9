"""Changes to the engine that affect all requests: new weights, adapters, pauses and sleep.

Everything runs on one event loop, so there are no locks.
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
    """Sends changes to the engine and waits for the results.

    tell: sends a message to the engine. It may raise EngineUnavailable.
    """

    def __init__(self, tell: Callable[[ToEngine], None]) -> None:
        self.paused = False  # a pause was requested and has not ended
        self.asleep: Sequence[Memory] = ()  # the kinds of memory that are released
        self._send = tell
        self._ids = count(1)
        self._asked: dict[int, asyncio.Future[Changed]] = {}

    def request_change(self, change: Change) -> asyncio.Future[Changed]:
        id = next(self._ids)
        return self._request(id, Alter(id, change))

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine, and return once it computes nothing.

        mode: what happens to requests in flight. abort: they fail. wait: they are finished first.
        keep: they continue after the pause.
        """
        id = next(self._ids)
        self.paused = True
        await self._request(id, Pause(id, mode))

    async def resume(self) -> None:
        """End a pause, and return once the engine computes requests again.

        Raises InvalidRequest if memory is released, because `wake` must be called first.
        """
        if self.asleep:
            raise InvalidRequest(
                f"the server is asleep ({', '.join(self.asleep)}): wake it first (POST /wake_up)"
            )
        id = next(self._ids)
        self.paused = False
        await self._request(id, Resume(id))

    async def update_weights(self, folder: str) -> bool:
        """Replace the model's weights with those of the checkpoint in `folder`. The engine must be
        paused.

        Returns True if cached image embeddings stay valid. Raises InvalidRequest if the weights
        cannot be loaded.
        """
        changed = await self.request_change(Change("weights", folder=folder))
        self._update_asleep(changed)
        if changed.error:
            raise InvalidRequest(changed.error, "model_path", "weights_unchanged")
        return not changed.tower

    async def sleep(
        self, memory: Sequence[Memory], mode: PauseMode, *, lightly: bool = False
    ) -> None:
        """Pause the engine and release `memory`. With `lightly`, release weights only if they are
        on a GPU.

        mode: as for `pause`. Raises InvalidRequest, before any request is affected, if this is not
        possible.
        """
        trial = Change("may sleep", memory=tuple(memory), lightly=lightly)
        changed = await self.request_change(trial)
        if not changed.error:
            before = self.paused
            await self.pause(mode)
            changed = await self.request_change(replace(trial, kind="sleep"))
            self._update_asleep(changed)
            if changed.error and not before:
                await self.resume()
        if changed.error:
            raise InvalidRequest(changed.error, None, "cannot_sleep")

    async def wake(self, memory: Sequence[Memory]) -> bool:
        """Allocate released memory again. End the pause once the engine has all of it.

        Returns True if cached image embeddings stay valid. Raises InvalidRequest if the memory
        cannot be allocated.
        """
        changed = Changed()
        if self.asleep:
            changed = await self.request_change(Change("wake", memory=tuple(memory)))
            self._update_asleep(changed)
        if changed.error:
            raise InvalidRequest(changed.error, None, "cannot_wake")
        if not self.asleep:
            await self.resume()
        return not changed.tower

    def _update_asleep(self, changed: Changed) -> None:
        self.asleep = changed.asleep

    def hear(self, altered: Altered) -> None:
        """Pass the engine's result of a change to the caller that waits for it."""
        waiting = self._asked.pop(altered.id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(altered.changed)

    def fail(self, reason: str) -> None:
        """Fail all changes that wait for a result with EngineUnavailable, because the engine has
        failed.
        """
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(reason))
                waiting.exception()  # avoids a log entry if the caller has disconnected
        self._asked.clear()

    def _request(self, id: int, message: ToEngine) -> asyncio.Future[Changed]:
        self._send(message)
        self._asked[id] = asyncio.get_running_loop().create_future()
        return self._asked[id]
