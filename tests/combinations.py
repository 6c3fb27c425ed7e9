"""Parameters of tests whose every combination would take too long for the default run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def combinations(*axes: Iterable[object], default: Sequence[tuple[object, ...]]) -> list[Any]:
    """Every combination of `axes`; those that are not in `default` are slow.

    The default should have each value of each axis, unless another test has it.
    """
    every = list(product(*axes))
    assert set(default) <= set(every)
    return [
        pytest.param(*each, marks=() if each in default else pytest.mark.slow) for each in every
    ]
