"""The client of an OCR run: finds the model, uploads PDFs, and sends one request per page.

A failure that would affect all pages is raised as `ServerGone`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from saccade.core.errors import SaccadeError
from saccade.core.given_paths import sendable
from saccade.core.shown_url import shown_url
from saccade.plugins.ocr.page_prompts import PagePrompt
from saccade.tools.server import cause, named_first, refusal, said, unreachable

CONNECT_SECONDS = 30.0
PAGE_SECONDS = 3600.0
"""Maximum seconds until a page is answered, including waiting."""
KEPT_SECONDS = 24 * 3600
"""Seconds after which the server deletes an upload, in case the command is killed."""
TRIES = 8
MAX_WAIT = 30.0
BUSY = frozenset((429, 503))
FORBIDDEN = frozenset((401, 403))
MAX_TOKENS = 4096
"""Default maximum number of tokens for a page."""


class ServerGone(SaccadeError):
    """Raised if the server has exited, is unreachable, or rejects this client, so that no page can
    be read.
    """


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A PDF that was uploaded to the server."""

    id: str
    pages: int

    def page(self, number: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return a page as a message part, and the fields to add to its request."""
        part = {"type": "file", "file": {"file_id": self.id}}
        return part, {"saccade": {"documents": "bare", "pages": [number]}}


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """A page's text and token counts.

    whole: False if the text was cut off at the limit.
    """

    text: str
    whole: bool
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, with the name that the server uses.

    context: the maximum tokens of prompt and answer together, or 0 if unknown.
    """

    name: str
    context: int


async def find_model(http: httpx.AsyncClient, address: str, name: str | None) -> ServedModel:
    """Return the server's model with this name, or by default its first one. Raises ConfigError."""
    try:
        reply = await http.get(f"{address}/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(address, error) from None
    name = name or named_first(address, reply.status_code, reply.text)
    with suppress(ValueError, KeyError, TypeError):
        for entry in json.loads(reply.text)["data"]:
            if entry["id"] == name:
                return ServedModel(name, int(entry["max_model_len"]))
    return ServedModel(name, 0)


class PageReader:
    """Sends pages to one model. Uploaded files are deleted when the context exits."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        address: str,
        model: ServedModel,
        prompt: PagePrompt,
        max_tokens: int | None,
    ) -> None:
        """Set up the requests.

        max_tokens: the maximum tokens per page. By default, at least half of the context remains
        for the page.
        """
        self.model = model.name
        self.prompt = prompt
        self.max_tokens = max_tokens or min(MAX_TOKENS, model.context // 2 or MAX_TOKENS)
        self._http = http
        self._address = address
        self._uploads: list[Uploaded] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        with suppress(httpx.HTTPError):
            for each in self._uploads:
                await self._http.delete(f"{self._address}/v1/files/{each.id}")

    async def upload(self, path: Path, data: bytes) -> Uploaded:
        """Upload a PDF. Raises SaccadeError and ServerGone."""
        lifetime = {"expires_after[anchor]": "created_at", "expires_after[seconds]": KEPT_SECONDS}
        name = sendable(path.name)[-255:]
        reply = await self._post(
            "/v1/files", data={"purpose": "user_data", **lifetime}, files={"file": (name, data)}
        )
        try:
            uploaded = Uploaded(str(reply["id"]), int(reply["pages"]))
        except (KeyError, TypeError, ValueError):
            raise SaccadeError(
                f"{shown_url(self._address)} does not report the number of pages of a PDF, as "
                "Saccade does: send its pages as images"
            ) from None
        self._uploads.append(uploaded)
        return uploaded

    async def read(self, part: Mapping[str, Any], more: Mapping[str, Any]) -> PageAnswer:
        """Read one page. Raises SaccadeError and ServerGone."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt.content(part)}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            **self.prompt.fields,
            **more,
        }
        reply = await self._post("/v1/chat/completions", json=body)
        try:
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return PageAnswer(
                str(choice["message"]["content"] or ""),
                choice.get("finish_reason") != "length",
                int(usage.get("prompt_tokens") or 0),
                int(cached),
                int(usage.get("completion_tokens") or 0),
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise SaccadeError(
                f"the server's response is not a chat completion: {said(reply)}"
            ) from None

    async def _post(self, path: str, **content: Any) -> Any:
        """Send a request, and return the JSON of the response. Retries while the server is busy."""
        for number in range(1, TRIES + 1):
            try:
                reply = await self._http.post(self._address + path, **content)
            except httpx.ReadTimeout:
                raise SaccadeError(f"no answer within {PAGE_SECONDS:.0f} s") from None
            except httpx.HTTPError as error:
                raise ServerGone(f"{shown_url(self._address)}: {cause(error)}") from None
            if reply.status_code not in BUSY or number == TRIES:
                break
            await asyncio.sleep(_wait(reply, number))
        if reply.status_code in FORBIDDEN:
            raise ServerGone(refusal(reply.status_code, reply.text))
        if reply.is_error:
            raise SaccadeError(refusal(reply.status_code, reply.text))
        try:
            return reply.json()
        except ValueError:
            raise SaccadeError(f"{shown_url(self._address)}{path} did not return JSON") from None


def _wait(reply: httpx.Response, number: int) -> float:
    try:
        told = float(reply.headers.get("retry-after", ""))
    except ValueError:
        told = 0.0
    return min(MAX_WAIT, max(told, 2.0 ** (number - 2)))


def connection(api_key: str | None, concurrency: int) -> httpx.AsyncClient:
    """Create the HTTP client for all requests of a run."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=concurrency + 2)
    timeout = httpx.Timeout(PAGE_SECONDS, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)
