"""Of a test's cases as few are in the default run as show all that it is about."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.breadth import broad, cover

PAIRS = 4
"""Of three axes with two values each, as few show each pair."""


def test_every_value_of_every_axis_is_covered_and_every_pair_where_that_is_asked() -> None:
    cases = [{"a": a, "b": b, "c": c} for a, b, c in product(range(5), range(2), range(3))]
    few = [cases[at] for at in cover(cases, 1)]
    assert len(few) == 5 and {case["a"] for case in few} == {*range(5)}
    assert {case["b"] for case in few} == {0, 1} and {case["c"] for case in few} == {0, 1, 2}
    pairs = [cases[at] for at in cover(cases, 2)]
    assert 15 <= len(pairs) < 20
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        assert {(case[one], case[other]) for case in pairs} == {
            (case[one], case[other]) for case in cases
        }


def test_values_that_go_together_are_one_axis_and_what_is_left_out_is_slow(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        "import pytest\n"
        "from tests.helpers.breadth import mark_the_rest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    mark_the_rest(items)\n"
    )
    pytester.makeini(
        "[pytest]\nmarkers =\n    sparse: more\n    once: one\n    whole: all\n"
        "    first: one\n    more: later\n    slow: not these"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.parametrize(('a', 'b'), [(1, 2), (1, 3), (2, 2)])\n"
        "@pytest.mark.parametrize('c', ['x', 'y'])\n"
        "def test_it(a, b, c): ...\n"
        "@pytest.mark.whole\n"
        "@pytest.mark.parametrize('a', [1, 2])\n"
        "@pytest.mark.parametrize('c', [3, 4])\n"
        "def test_all(a, c): ...\n"
        "@pytest.mark.once('a')\n"
        "@pytest.mark.parametrize('a', [1, 2, 3])\n"
        "@pytest.mark.parametrize('c', [3, 4])\n"
        "def test_one(a, c): ...\n"
        "@pytest.mark.sparse(pairs=True)\n"
        "@pytest.mark.parametrize('a', [1, 2])\n"
        "@pytest.mark.parametrize('b', [3, 4])\n"
        "@pytest.mark.parametrize('c', [5, 6])\n"
        "def test_pairs(a, b, c): ...\n"
        "@pytest.mark.first\n"
        "@pytest.mark.parametrize('a', [1, 2, 3])\n"
        "@pytest.mark.parametrize('b', [4, 5, 6])\n"
        "def test_first(a, b): ...\n"
        "@pytest.mark.parametrize('a', [1, 2, pytest.param(3, marks=pytest.mark.more)])\n"
        "@pytest.mark.parametrize('b', [4, 5])\n"
        "def test_later(a, b): ...\n"
        "def test_other(): ...\n"
    )
    default = 3 + 4 + 2 + PAIRS + 1 + 2 + 1
    later, slow = 2 + 2, 3 + 4 + 8 - PAIRS + 6 + 2
    shown = pytester.runpytest_inprocess("-m", "not slow and not more", "-p", "no:cacheprovider")
    shown.assert_outcomes(passed=default, deselected=later + slow)
    shown = pytester.runpytest_inprocess("-m", "not slow and more", "-p", "no:cacheprovider")
    shown.assert_outcomes(passed=later, deselected=default + slow)


def test_what_is_kept_must_be_there() -> None:
    kept, slow = broad(["a", "b"], keep=["a"])
    assert kept == "a" and slow.marks[0].name == "slow" and slow.values == ("b",)
    with pytest.raises(AssertionError, match="no case"):
        broad(["a"], keep=["c"])


def test_without_float32_other_formats_and_what_has_no_format_stay(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        "import pytest\n"
        "from tests.helpers.breadth import take_float32\n"
        "def pytest_collection_modifyitems(config, items):\n"
        "    config.hook.pytest_deselected(items=take_float32(items))\n"
    )
    pytester.makepyfile(
        "import pytest, torch\n"
        "HALVES = [torch.float16, torch.bfloat16]\n"
        "@pytest.mark.parametrize('dtype', [torch.float32, *HALVES])\n"
        "def test_format(dtype): assert dtype in HALVES\n"
        "@pytest.mark.parametrize(('size', 'dtype'), [(1, torch.float32), (2, torch.float16)])\n"
        "def test_together(size, dtype): assert dtype in HALVES\n"
        "@pytest.mark.parametrize('name', ['torch.float32', 'other'])\n"
        "def test_name(name): ...\n"
        "def test_plain(): ...\n"
    )
    shown = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    shown.assert_outcomes(passed=2 + 1 + 2 + 1, deselected=2)
