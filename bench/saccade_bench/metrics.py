"""Parse a server's /metrics page."""

from __future__ import annotations

from contextlib import suppress


def series(page: str) -> dict[str, float]:
    """Return each metric's value by its name, which includes the labels as written.

    Lines in other formats are skipped, because other servers may return any page.
    """
    found = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if not name.startswith("#"):
            with suppress(ValueError):
                found[name] = float(value)
    return found


def total(found: dict[str, float], metric: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(value for name, value in found.items() if name.partition("{")[0] == metric)
