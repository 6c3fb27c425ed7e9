"""GET /openapi.json, and GET /docs, which shows it as a page.

The page's files are in `web/`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from saccade.api.handlers import json_response
from saccade.api.mounting import ApiContext
from saccade.api.served_file import ServedFile
from saccade.plugins.docs.openapi import describe

FOLDER = Path(__file__).parent / "web"
FILES = {"/docs": "index.html", "/docs/docs.js": "docs.js", "/docs/docs.css": "docs.css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The Content-Security-Policy: scripts and requests only from and to this server, and no HTML that
is built from text.
"""


def docs_routes(api: ApiContext) -> list[Route]:
    """Return the routes. The page's files are read once."""
    files = {path: ServedFile(FOLDER / name, POLICY) for path, name in FILES.items()}
    page = files.pop("/docs")

    async def docs(request: Request) -> Response:
        if request.scope["raw_path"].endswith(b"/"):
            return RedirectResponse("../docs")  # the page's links are relative
        return await page.answer(request)

    async def openapi(_: Request) -> Response:
        return json_response(await asyncio.to_thread(describe, api.plugins))

    return [
        Route("/openapi.json", openapi),
        Route("/docs", docs),
        *(Route(path, file.answer) for path, file in files.items()),
    ]
