"""Options of a server by their names, whichever group has them."""

from __future__ import annotations

from typing import Any

from saccade.commands import GROUPS, HEADINGS
from saccade.core.options import ServeOptions
from saccade.core.tuning import take_options


def serve_options(**named: Any) -> ServeOptions:
    groups = {name: take_options(kind, named) for name, kind, _ in GROUPS}
    assert not named, f"no group has {[*named]}"
    own = {name: groups.pop(name) for name in HEADINGS}
    return ServeOptions(**own, extras=tuple(groups.values()))
