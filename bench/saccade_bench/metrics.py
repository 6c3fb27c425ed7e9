"""What a server's /metrics says."""

from __future__ import annotations

from contextlib import suppress


def series(page: str) -> dict[str, float]:
    """Return each metric's value by its name, with labels as they are written.

    Other lines are skipped: a foreign server may answer with any page.
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
