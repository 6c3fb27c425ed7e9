"""After an error of the GPU nothing works in a process any more: it ends, its test is named, and
the other tests go on in another process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from saccade_bench.gpu_check import pytest_results
from saccade_bench.gpu_check.pytest_results import read_results

ROOT = Path(__file__).parents[1]
CONFTEST = "from tests.helpers.cuda_errors import pytest_runtest_makereport\n"
TESTS = """
import pytest

BROKEN = []

@pytest.mark.parametrize("number", range(12))
def test_kernel(number):
    if number == 3:
        BROKEN.append(number)
        raise RuntimeError({said!r})
    assert not BROKEN, "a process that is broken goes on"
    assert number != 7
"""


@pytest.mark.more
@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: an illegal memory access was encountered",
        "Triton Error [CUDA]: misaligned address",
    ],
)
def test_a_process_that_met_an_error_of_the_gpu_ends_and_its_test_is_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'bench'}")
    results = pytester.path / "tests.jsonl"
    monkeypatch.setenv(pytest_results.PLACE, str(results))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # its run is one of its own
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS.format(said=said))
    command = [sys.executable, "-m", "pytest", "-p", pytest_results.NAME, "-p", "no:cacheprovider"]
    done = pytester.run(*command, "-n", "2", "--dist", "load")
    assert done.ret == 1
    found = read_results(results)
    names = {test.split("::")[-1]: said for test, said in found.bad.items()}
    assert [*sorted(names)] == ["test_kernel[3]", "test_kernel[7]"]
    assert names["test_kernel[3]"] == said
    assert [test.split("::")[-1] for test in found.broken] == ["test_kernel[3]"]
    assert found.outcomes["passed"] == 10 and not found.unfinished


def test_without_other_processes_it_only_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one process there is nobody to take its place."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        "def test_one(): raise RuntimeError('CUDA error: misaligned address')\n"
        "def test_two(): ...\n"
    )
    shown = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    shown.assert_outcomes(failed=1, passed=1)


def test_named_tests_are_run_alone_and_names_that_are_gone_stop_none(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pytester.makepyfile(test_first="def test_a(): ...\ndef test_b(): ...\n")
    second = pytester.makepyfile(test_second="def test_c(): ...\ndef test_d(): ...\n")
    names = pytester.path / "names.txt"
    names.write_text("test_first.py::test_b\ntest_first.py::test_gone[1]\ntest_second.py\n")
    monkeypatch.setenv(pytest_results.ALONE, str(names))
    words = (str(first), str(second), "-p", pytest_results.NAME, "-p", "no:cacheprovider")
    shown = pytester.runpytest_inprocess(*words)
    shown.assert_outcomes(passed=3, deselected=1)


def test_lines_of_a_run_that_was_cut_off_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    assert read_results(path).outcomes == {}
    path.write_text(json.dumps({"test": "a", "outcome": "passed"}) + '\n{"test": "b", "ou')
    assert read_results(path).outcomes == {"passed": 1}
