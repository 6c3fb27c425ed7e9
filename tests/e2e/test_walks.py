"""The files that a request enters are those that `tests/walks.txt` names (`tests/e2e/walks.py`).

Image workers cannot be looked into: a new image enters five files more.
"""

from __future__ import annotations

import pytest

from tests.e2e.walks import TESTS, Measured, read

pytestmark = pytest.mark.more


def test_a_request_enters_the_files_that_are_named(
    measured: tuple[Measured, Measured], capsys: pytest.CaptureFixture[str]
) -> None:
    walks, _ = measured
    with capsys.disabled():
        print(f"\n{walks.describe()}", end="")
    kernels = read((TESTS / "loads.txt").read_text()).kernels()
    listed = read((TESTS / "walks.txt").read_text())
    differences = listed.differences(walks.without(kernels))
    assert not differences, "\n".join(("tests/walks.txt:", *differences))
