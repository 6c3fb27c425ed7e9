"""Send screenshots to a Saccade server, and measure TTFT and reused tiles (from the trace)."""

from __future__ import annotations

import secrets
import time
from typing import Any, NamedTuple

import httpx

from saccade_bench.image_files import image_part
from saccade_bench.screens.desktop import QUIET, Desktop, Format, screenshot


class TimedTurn(NamedTuple):
    """TTFT in ms after a similar screenshot (`warm`) and without one (`cold`), and the number of
    new and of cached tiles in the former.
    """

    warm: float
    cold: float
    new: int
    seen: int


class ServedScreens:
    """A server, and a `cache_salt` prefix that is unique to this run."""

    def __init__(self, url: str, format: Format) -> None:
        self._http = httpx.Client(base_url=url.removesuffix("/v1"), timeout=600)
        self._model = self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self._format, self._run = format, secrets.token_hex(4)

    def turn(self, event: Desktop, name: str) -> TimedTurn:
        """Send an event's screenshot cold, and then, as another tenant, after the initial one."""
        shot, quiet = (screenshot(each, self._format) for each in (event, QUIET))
        cold, _ = self._ask(shot, f"{self._run} cold {name}")
        self._ask(quiet, f"{self._run} warm {name}")
        warm, tiles = self._ask(shot, f"{self._run} warm {name}")
        return TimedTurn(warm, cold, tiles.get("new", 0), tiles.get("seen", 0))

    def _ask(self, shot: bytes, salt: str) -> tuple[float, dict[str, Any]]:
        part = image_part(shot, f"image/{self._format.lower()}")
        parts = [part, {"type": "text", "text": "go"}]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 1,
            "cache_salt": salt,
            "saccade": {"trace": True},
        }
        begun = time.perf_counter()
        answer = self._http.post("/v1/chat/completions", json=body)
        ms = 1e3 * (time.perf_counter() - begun)
        answer.raise_for_status()
        (image,) = answer.json()["saccade"]["images"]
        return ms, image.get("tiles", {})
