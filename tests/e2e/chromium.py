"""A headless Chromium, driven over pipes by its DevTools protocol: pages, scripts in them, pictures
of them.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SECONDS = 30.0
"""For one answer of the browser."""


class Navigated(Exception):
    """The page was left while it was asked for something."""


class Browser:
    """The page that is open. `complaints`: what its console and its policies said."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            found = self._receive(deadline)
            if found.get("id") == self._count:
                if "navigated" in found.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self._note(found)

    def open(self, url: str, width: int = 1280, height: int = 800) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = SECONDS) -> Any:
        """The first value of an expression that is true, as JavaScript sees it: an element, too."""
        deadline = time.monotonic() + seconds
        value = None
        while value in (None, False, 0, ""):
            assert time.monotonic() < deadline, f"never: {script}; {self.complaints}"
            time.sleep(0.02)
            with suppress(Navigated):
                value = self.run(script)
        return value

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(str(details))
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as entry}}:
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own below `folder`; it ends with the block."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    flags = (
        "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
        f"--disable-background-networking --user-data-dir={folder / 'profile'} "
        "--remote-debugging-pipe"
    )
    # The protocol's pipes are descriptors 3 and 4.
    command = f'exec "{CHROMIUM}" {flags} 3<&{to_read} 4>&{from_write}'
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_read, from_write), stdout=log, stderr=log
        )
    for descriptor in (to_read, from_write):
        os.close(descriptor)
    try:
        yield Browser(to_write, from_read)
    finally:
        os.close(to_write)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_read)
