"""Selects tile sizes for small-batch GEMMs with packed weights, so that all multiprocessors have
work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PROGRAMS = 120
"""Minimum number of programs, which is roughly the number of multiprocessors of a data
centre GPU.
"""


class Tiling(NamedTuple):
    """The tile that one program multiplies: `rows` of x by `outputs`.

    The inputs are divided into `splits` parts, whose sums are added in a fixed order at the end.
    """

    rows: int
    outputs: int
    splits: int
    warps: int
    stages: int


def first_that_fills(cuts: Sequence[Tiling], rows: int, outputs: int) -> Tiling:
    """Return the first tiling in `cuts` that results in at least `PROGRAMS` programs, or else the
    last one.

    rows: the number of rows of x.
    """
    for cut in cuts:
        if -(-rows // cut.rows) * -(-outputs // cut.outputs) >= PROGRAMS:
            return cut
    return cuts[-1]
