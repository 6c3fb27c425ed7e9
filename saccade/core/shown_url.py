"""Removes user names and passwords from URLs for errors, logs and traces."""

from __future__ import annotations

import re

MOST = 200
"""Maximum number of characters of a URL to show."""
_BEGIN = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?[/\\]*", re.IGNORECASE)
_END = re.compile(r"[/\\?#]|$")
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::\d*)?")


def shown_url(url: str) -> str:
    """Return the first `MOST` characters of a URL, with "..." instead of a user name and
    password.
    """
    begin = _BEGIN.match(url)
    start = begin.end() if begin else 0
    end = _END.search(url, start)
    host = url[start : end.start() if end else len(url)]
    at = start + host.rfind("@") if "@" in host else -1
    if at < 0 and _HOST.fullmatch(host) is None:  # the password contains a slash
        at = url.rfind("@", start)
    return (url if at < 0 else f"{url[:start]}...{url[at:]}")[:MOST]
