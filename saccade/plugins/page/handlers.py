"""GET /: a page to try the server with.

Owns the page's files and their permissions. `web/` has HTML, styles and JavaScript modules, and in
`vendor/` libraries as their authors published them. The page fetches only these. The browser does
the work, through every client's API.
"""

from __future__ import annotations

from pathlib import Path

from starlette.routing import Route

from saccade.api.mounting import ApiContext
from saccade.api.served_file import CONTENT_TYPES, ServedFile

WEB = Path(__file__).parent / "web"
INDEX = "index.html"
FILES = {
    "/" if path.name == INDEX else f"/page/{path.relative_to(WEB).as_posix()}": path
    for path in WEB.rglob("*")
    if path.suffix in CONTENT_TYPES
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; media-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
"""Content-Security-Policy: no script, style or request but this server's own, and no text that
becomes HTML but through the sanitiser (`web/vendor/purify.min.js`), whose policy `dompurify` is.
"""


def page_routes(_: ApiContext) -> list[Route]:
    """Build a route for each of the page's files, which are read once."""
    return [Route(path, ServedFile(file, POLICY).answer) for path, file in FILES.items()]
