"""GET /openapi.json, and GET /docs, which shows it in Swagger UI.

Owns the viewer's files (`swagger/`, the library as its authors published it) and their permissions.
Knows nothing of what the document says.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from saccade.api.about.openapi import describe
from saccade.api.about.page import ServedFile
from saccade.api.handlers import json_response
from saccade.api.mounting import ApiContext

FOLDER = Path(__file__).parent / "swagger"
FILES = {
    "/docs": "index.html",
    **{f"/docs/{name}": name for name in ("start.js", "swagger-ui-bundle.js", "swagger-ui.css")},
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: no script and no request but this server's own."""


def docs_routes(_: ApiContext) -> list[Route]:
    """Build the routes. The viewer's files are read once."""
    files = {path: ServedFile(FOLDER / name, POLICY) for path, name in FILES.items()}
    page = files.pop("/docs")

    async def docs(request: Request) -> Response:
        if request.scope["raw_path"].endswith(b"/"):
            return RedirectResponse("../docs")  # the page's links are relative
        return await page.answer(request)

    return [
        Route("/openapi.json", openapi),
        Route("/docs", docs),
        *(Route(path, file.answer) for path, file in files.items()),
    ]


async def openapi(_: Request) -> Response:
    return json_response(await asyncio.to_thread(describe))
