"""Converts dataclasses of options to the arguments of a command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from saccade.core.tuning import tuning_values

Tuned = Annotated[tuple[str, ...], Parameter(name="--tune", group="Tuning", consume_multiple=False)]


def flat(kind: type[Any], group: str) -> Parameter:
    """Return the cyclopts parameter that makes each field of a dataclass a separate option, under
    the heading `group` in the help.

    Tuning values are left out, because they are set with --tune.
    """
    tuning = "|".join(tuning_values([kind]))
    return Parameter(name="*", group=group, parse=re.compile(f"^(?!({tuning})$)"))


def joined(groups: Sequence[tuple[str, type[Any], str]]) -> type[Any]:
    """Build a dataclass whose fields are dataclasses of options. groups: (field name, dataclass,
    heading) of each.
    """
    fields = [
        (name, Annotated[kind, flat(kind, heading)], kind()) for name, kind, heading in groups
    ]
    # Without `__module__`, the class would be in the module `types`, and cyclopts treats classes
    # from there as builtins.
    return make_dataclass("Options", fields, namespace={"__module__": __name__}, frozen=True)


def tuning_help(kinds: Sequence[type]) -> str:
    """Return a list of the tuning values and their meanings, for the end of the help."""
    lines = (f"* {each.described}" for each in tuning_values(kinds).values())
    return "\n".join(("Tuning values, for --tune NAME=VALUE:", "", *lines))
