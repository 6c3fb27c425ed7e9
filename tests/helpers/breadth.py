"""Which of a test's cases are in which run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations as subsets
from itertools import product
from typing import Any

import pytest

Case = dict[str, int]
"""Of each axis, which of its values."""


def broad(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """`cases` for `pytest.mark.parametrize`, in their order; those not in `keep` are slow."""
    cases = [*cases]
    unknown = [case for case in keep if case not in cases]
    assert not unknown, f"no case: {unknown}"
    return [case if case in keep else _slow(case) for case in cases]


def combinations(*axes: Iterable[object], default: Collection[tuple[object, ...]]) -> list[Any]:
    """Every combination of `axes`; those that are not in `default` are slow.

    The default should have each value of each axis, unless another test has it.
    """
    return broad(product(*axes), keep=default)


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


def cover(cases: Sequence[Case], strength: int) -> list[int]:
    """The places of a few of `cases` that show all that these show: each value of each axis
    (strength 1), each beside each of every other axis (2).
    """
    shown = [set(subsets(sorted(case.items()), min(strength, len(case)))) for case in cases]
    chosen, missing = list[int](), set[Any]().union(*shown)
    while missing:
        best = max(range(len(cases)), key=lambda at: len(shown[at] & missing))
        chosen.append(best)
        missing -= shown[best]
    return sorted(chosen)


def _case(item: pytest.Function) -> Case:
    """Values are those of the test's lists, so the same objects; names that one `parametrize`
    gives together are one axis.
    """
    case = {name: id(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        together = [name.strip() for name in names]
        if len(together) > 1:
            case[" ".join(together)] = hash(tuple(case.pop(name) for name in together))
    return case


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Of each test's cases, those that show no new value of any axis become slow. A test marked
    `sparse(pairs=True)` keeps each pair of values, `once(axis)` the first value of that axis alone,
    and `whole` all its cases. Of what is left of a test marked `first`, all but the first becomes
    `more`. What is `more` already is on its own: its cases show every value once again.
    """
    tests: dict[tuple[Any, ...], list[pytest.Function]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            more = item.get_closest_marker("more") is not None
            tests.setdefault((item.path, item.cls, item.originalname, more), []).append(item)
    for them in tests.values():
        few = them if them[0].get_closest_marker("whole") else _few(them)
        for item in them:
            if item not in few:
                item.add_marker(pytest.mark.slow)
            elif item is not few[0] and item.get_closest_marker("first"):
                item.add_marker(pytest.mark.more)


def take_float32(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove the cases whose number format is float32, and return them."""
    taken = [item for item in items if hasattr(item, "callspec") and _is_float32(item)]
    items[:] = [item for item in items if item not in taken]
    return taken


def _is_float32(item: Any) -> bool:
    return any(
        type(value).__name__ == "dtype" and str(value) == "torch.float32"
        for value in item.callspec.params.values()
    )


def _few(items: Sequence[pytest.Function]) -> Sequence[pytest.Function]:
    """Of a test's cases, those that are not slow."""
    for once in items[0].iter_markers("once"):
        (axis,) = once.args
        first = items[0].callspec.params[axis]
        items = [item for item in items if item.callspec.params[axis] is first]
    mark = items[0].get_closest_marker("sparse")
    strength = 2 if mark and mark.kwargs.get("pairs") else 1
    return [items[at] for at in cover([_case(item) for item in items], strength)]
