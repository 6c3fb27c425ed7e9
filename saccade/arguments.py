"""How dataclasses of options become a command's arguments.

Knows no option and no command.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from saccade.core.tuning import tuning_values

Tuned = Annotated[tuple[str, ...], Parameter(name="--tune", group="Tuning", consume_multiple=False)]


def flat(kind: type[Any], group: str) -> Parameter:
    """Make a dataclass's fields separate options, under a heading in the help.

    Tuning values are left out.
    """
    tuning = "|".join(tuning_values([kind]))
    return Parameter(name="*", group=group, parse=re.compile(f"^(?!({tuning})$)"))


def joined(groups: Sequence[tuple[str, type[Any], str]]) -> type[Any]:
    """Return a dataclass of option dataclasses: (name of its field, dataclass, heading)."""
    fields = [
        (name, Annotated[kind, flat(kind, heading)], kind()) for name, kind, heading in groups
    ]
    # A class of the module `types`, which it would have, is a builtin to cyclopts.
    return make_dataclass("Options", fields, namespace={"__module__": __name__}, frozen=True)


def tuning_help(kinds: Sequence[type]) -> str:
    """List the tuning values with their meanings, for the end of the help."""
    lines = (f"* {each.described}" for each in tuning_values(kinds).values())
    return "\n".join(("Tuning values, for --tune NAME=VALUE:", "", *lines))
