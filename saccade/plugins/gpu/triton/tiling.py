"""How products of few rows with packed weights are cut, so that a GPU has programs enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PROGRAMS = 120
"""About as many as a data centre's GPU has multiprocessors."""


class Tiling(NamedTuple):
    """What a program multiplies: this many rows of x, and outputs.

    `splits` parts of the inputs are added up in the end, in order.
    """

    rows: int
    outputs: int
    splits: int
    warps: int
    stages: int


def first_that_fills(cuts: Sequence[Tiling], rows: int, outputs: int) -> Tiling:
    """Return the first cut that makes enough programs, else the last."""
    for cut in cuts:
        if -(-rows // cut.rows) * -(-outputs // cut.outputs) >= PROGRAMS:
            return cut
    return cuts[-1]
