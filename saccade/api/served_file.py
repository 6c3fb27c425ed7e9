"""Serves files of web pages. Each is read once, when the server starts."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class ServedFile:
    """Serves one file, which is read at construction. policy: its Content-Security-Policy."""

    def __init__(self, path: Path, policy: str) -> None:
        self._body = path.read_bytes()
        self._kind = CONTENT_TYPES[path.suffix]
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",
            "etag": self._tag,
        }

    async def answer(self, request: Request) -> Response:
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers, media_type=self._kind)
