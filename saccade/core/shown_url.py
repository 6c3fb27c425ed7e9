"""URLs for people: in errors, logs and traces.

Owns what is left out: the user and the password before a host.
"""

from __future__ import annotations

import re

MOST = 200
"""Characters that are shown."""
_BEGIN = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?[/\\]*", re.IGNORECASE)
_END = re.compile(r"[/\\?#]|$")
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::\d*)?")


def shown_url(url: str) -> str:
    """Return a URL's beginning, with "..." for a user and a password."""
    begin = _BEGIN.match(url)
    start = begin.end() if begin else 0
    end = _END.search(url, start)
    host = url[start : end.start() if end else len(url)]
    at = start + host.rfind("@") if "@" in host else -1
    if at < 0 and _HOST.fullmatch(host) is None:  # a slash within a password
        at = url.rfind("@", start)
    return (url if at < 0 else f"{url[:start]}...{url[at:]}")[:MOST]
