"""LoRA adapters, by the names that clients use.

The engine identifies adapters by number. An adapter has a name from when every rank has loaded it
until it is unloaded. Its memory is freed once the last request that uses it has finished.
Everything runs on one event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from saccade.core.errors import (
    InvalidRequest,
    NotFound,
    RequestError,
    StartupError,
)
from saccade.core.plan import Change, Changed
from saccade.core.types import AdapterRef
from saccade.front.changes import EngineChanges

MAX_NAME = 200
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded LoRA adapter, with the memory that it takes."""

    name: str
    folder: str
    ref: AdapterRef
    rank: int
    nbytes: int  # memory on each rank


class AdapterRegistry:
    """Loads and unloads LoRA adapters.

    At most `most` adapters exist at a time, including unloaded ones that requests in flight still
    use.
    """

    def __init__(
        self,
        changes: EngineChanges,
        most: int = 0,
        wanted: Mapping[str, str] = NOTHING,
    ) -> None:
        """Create a registry without adapters. wanted: directories by name, which `load_wanted`
        loads.
        """
        self.changes = changes
        self._wanted = wanted
        self._most = most
        self._numbers = count(1)
        self._named: dict[str, Adapter] = {}
        self._busy: set[str] = set()  # names of adapters that are being loaded
        self._leaving = 0

    @property
    def loaded(self) -> Sequence[Adapter]:
        """The loaded adapters, oldest first."""
        return list(self._named.values())

    @property
    def names(self) -> Sequence[str]:
        return list(self._named)

    def find(self, name: str) -> Adapter | None:
        return self._named.get(name)

    def check(self, ref: AdapterRef) -> None:
        """Raise NotFound if the adapter was unloaded after its request was parsed."""
        if ref.number and all(each.ref != ref for each in self._named.values()):
            raise NotFound(
                "the adapter was unloaded before the request started", "model", "model_not_found"
            )

    async def load_wanted(self) -> None:
        """Load the adapters from --lora. Raises StartupError if one cannot be loaded."""
        for name, folder in self._wanted.items():
            try:
                await self.load(name, folder)
            except RequestError as error:
                raise StartupError(f"--lora {name}={folder}: {error.message}") from None

    async def load(self, name: str, folder: str) -> Adapter:
        """Load the adapter in `folder`, and return it once requests may use it.

        Raises InvalidRequest if it cannot be loaded or the name is taken.
        """
        self._check_new(name, folder)
        self._busy.add(name)
        try:
            number = next(self._numbers)
            changed = await self.changes.request_change(Change("load adapter", number, folder))
        finally:
            self._busy.discard(name)
        if changed.error:
            raise InvalidRequest(changed.error, "lora_path", "invalid_adapter")
        ref = AdapterRef(number, changed.fingerprint, changed.tower, name)
        self._named[name] = made = Adapter(name, folder, ref, changed.rank, changed.nbytes)
        return made

    def unload(self, name: str) -> None:
        """Remove an adapter's name immediately, and free its memory once its requests have
        finished.

        Raises NotFound if there is no such adapter.
        """
        if (gone := self._named.pop(name, None)) is None:
            raise NotFound(
                f"no adapter has the name {name[:200]!r}", "lora_name", "model_not_found"
            )
        self._leaving += 1
        made = self.changes.request_change(Change("drop adapter", gone.ref.number))
        made.add_done_callback(self._left)

    def _left(self, _: asyncio.Future[Changed]) -> None:
        self._leaving -= 1

    def _check_new(self, name: str, folder: str) -> None:
        if not name or len(name) > MAX_NAME:
            raise InvalidRequest(
                f"lora_name: expected 1 to {MAX_NAME} characters, got {len(name)}", "lora_name"
            )
        if name in self._named or name in self._busy:
            raise InvalidRequest(
                f"lora_name: {name!r} is loaded or being loaded: unload it first, or choose "
                "another name",
                "lora_name",
            )
        if not Path(folder).is_absolute() or "\0" in folder:
            raise InvalidRequest(
                f"lora_path: expected an absolute path on the server, got {folder[:200]!r}",
                "lora_path",
            )
        held = len(self._named) + len(self._busy) + self._leaving
        if held >= self._most:
            raise InvalidRequest(
                f"lora_name: {held} adapters are loaded or still used by requests; the limit is "
                f"{self._most}: unload one, or start the server with --tune max_loras=N",
                "lora_name",
                "too_many_adapters",
            )
