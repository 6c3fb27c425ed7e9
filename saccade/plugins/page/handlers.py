"""GET /: the web UI.

`web/` has the page's HTML, styles and JavaScript modules, and unmodified libraries in `vendor/`.
The Content-Security-Policy allows the page to load only these files. All work is done in the
browser, through the public API.
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
"""The Content-Security-Policy. Scripts, styles and requests may only use this server. HTML may only
be created from text through the sanitizer (`web/vendor/purify.min.js`), whose policy is
`dompurify`.
"""


def page_routes(_: ApiContext) -> list[Route]:
    """Return a route for each of the page's files, which are read once."""
    return [Route(path, ServedFile(file, POLICY).answer) for path, file in FILES.items()]
