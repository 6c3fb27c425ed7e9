"""Starts a `saccade serve` process, monitors its health, and stops it.

It is an ordinary server with its own port, except that the kernel kills it when this process exits.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import httpx

from saccade.core.errors import StartupError
from saccade.edge.headers import INSTANCE_HEADER
from saccade.ipc.tied import start_tied

ANNOUNCED = "serving at "
"""The text that a server prints before its address when it is ready (`api/serve.py`)."""
GRACE, GRACE_SECONDS = "--shutdown-grace", 30.0
"""The option of a server for how many seconds requests in flight may take to finish, and its
default.
"""
LAST_LINES = 20
NO_VARIABLES: Mapping[str, str] = {}
ASK_SECONDS = 5.0
KILL_SECONDS = 10.0
"""Seconds that a server may take to exit after its grace period, before it is killed."""
PAGES, RUNNING = "saccade_kv_pages", "saccade_requests_running"
WAITING = "saccade_requests_waiting"
FREE = 'owner="free"'


class OwnedServer:
    """One server process.

    ended: a future with the exit status.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str],
        host: str,
        environment: Mapping[str, str] = NO_VARIABLES,
        label: str = "",
    ) -> None:
        """Start the server.

        environment: variables in addition to this process's environment.
        label: a prefix for the lines that the server prints.

        The calling thread must stay alive, because the server is killed when that thread exits.
        """
        words = ["serve", model, *options, "--host", host, "--port", "0"]
        if "--metrics-without-key" not in options:
            words.append("--metrics-without-key")
        self._process = start_tied(
            "saccade",
            *words,
            environment={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        named = GRACE in options[:-1]
        self._grace = float(options[options.index(GRACE) + 1]) if named else GRACE_SECONDS
        self._label = label
        self._said: deque[str] = deque(maxlen=LAST_LINES)
        self._http = httpx.AsyncClient(timeout=ASK_SECONDS)
        self._address: Future[str] = Future()
        self.ended: Future[int] = Future()
        threading.Thread(target=self._listen, daemon=True, name="saccade-owned").start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> list[str]:
        """The last lines that the server has printed."""
        return [line.strip() for line in list(self._said) if line.strip()]

    def ready(self) -> str:
        """Block until the server is ready, and return its URL. Raises StartupError."""
        return self._address.result()

    async def serving(self) -> str:
        """Wait until the server is ready, and return its URL. Raises StartupError."""
        return await asyncio.shield(asyncio.wrap_future(self._address))

    async def health(self) -> str:
        """Return the ID of the server's instance. Raises RuntimeError if the server is not
        healthy.
        """
        try:
            answer = await self._http.get(f"{self._address.result(0)}/health")
        except httpx.TransportError as error:
            raise RuntimeError(f"the server does not respond: {error!r}") from None
        if not answer.is_success:
            raise RuntimeError(f"the server is unhealthy: {answer.text[:400]}")
        return str(answer.headers.get(INSTANCE_HEADER, ""))

    async def stats(self) -> dict[str, float]:
        """Read statistics from the server's metrics: the requests `running` and `waiting`, and
        `kv_use`, the fraction of KV pages in use. Raises httpx.TransportError.
        """
        metrics = (await self._http.get(f"{self._address.result(0)}/metrics")).text
        values = {RUNNING: 0.0, WAITING: 0.0}
        pages = {FREE: 0.0}
        for line in metrics.splitlines():
            name, _, value = line.rpartition(" ")
            if name in values:
                values[name] = float(value)
            elif name.startswith(f"{PAGES}{{"):
                pages[name[len(PAGES) + 1 : -1]] = float(value)
        every = sum(pages.values())
        use = 1 - pages[FREE] / every if every else 0.0
        return {"running": values[RUNNING], "waiting": values[WAITING], "kv_use": round(use, 4)}

    async def stop(self) -> None:
        """Stop the server. Requests in flight can finish within the server's grace period."""
        await self._http.aclose()
        self._process.terminate()
        try:
            async with asyncio.timeout(self._grace + KILL_SECONDS):
                await asyncio.shield(asyncio.wrap_future(self.ended))
        except TimeoutError:
            self._process.kill()
            await asyncio.wrap_future(self.ended)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"{self._label}{line}", end="", flush=True)
            self._said.append(line)
            if line.startswith(ANNOUNCED) and not self._address.done():
                self._address.set_result(line.removeprefix(ANNOUNCED).strip().removesuffix("/v1"))
        status = self._process.wait()
        if not self._address.done():
            why = "".join(self._said).strip()
            self._address.set_exception(StartupError(f"the server exited with {status}: {why}"))
        self.ended.set_result(status)
