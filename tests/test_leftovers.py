"""What tests leave in the temporary folder fails the session, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGIN = "pytest_plugins = ['tests.helpers.leftovers']"
TESTS = """
import tempfile

def test_in_order():
    with tempfile.TemporaryDirectory() as folder:
        assert folder

def test_leaves_something():
    tempfile.mkdtemp(prefix={prefix!r})
"""


@pytest.mark.parametrize(("prefix", "status"), [("left-", 1), ("torchinductor_", 0)])
def test_what_is_left_fails_the_session_by_name(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, prefix: str, status: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(pytester.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(TESTS.format(prefix=prefix))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    assert result.ret == status
    result.assert_outcomes(passed=2)
    assert ("left in the temporary folder: left-" in result.stdout.str()) == bool(status)
    assert not list(pytester.path.glob("saccade-tests-*"))
