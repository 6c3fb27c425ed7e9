"""The scoreboard calls an engine wrong if a fresh one repeats the wrong answer, and only then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.core.model_folder import DEMO
from saccade_bench.fixtures.server import Server, serving
from saccade_bench.prove.cases import CASES
from saccade_bench.scoreboard.__main__ import run
from saccade_bench.scoreboard.engines import ENGINES, ScoredEngine
from saccade_bench.scoreboard.rows import ScoredCase, ScoredRow, combined, page, read_row

ROOT = Path(__file__).parents[3]
PLANTED = """
import signal, sys
from tests.tools.faulty import Fault, by_bytes, without_palette, faulty
with faulty(sys.argv[1], Fault(eval(sys.argv[2])), port=int(sys.argv[3])):
    signal.pause()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("scoreboard")) as found:
        yield found


def planted(server: Server, folder: Path, serves: str) -> ScoredEngine:
    """An engine whose cache has the key `serves`, and no fault when it is cold."""
    script = folder / "planted.py"
    script.write_text(PLANTED)
    start = f"env PYTHONPATH={ROOT} {{python}} {script} {server.url}"
    cold = f"{start} by_bytes {{port}}"
    absent = {"tenant": "it documents no cache_salt"}
    return ScoredEngine("planted", (), f"{start} {serves} {{port}}", cold, lambda _: DEMO, absent)


def test_a_planted_fault_is_wrong_by_both_kinds_of_evidence_and_repeated(
    server: Server, tmp_path: Path
) -> None:
    row = run(planted(server, tmp_path, "without_palette"), tmp_path, 4, ("palette", "plain"))
    palette, plain = row.cases["palette"], row.cases["plain"]
    assert palette.wrong and palette.cold is not None and palette.cold[1]
    assert len(palette.requests) == 2
    assert plain.passed and not plain.requests
    line = next(each for each in page([row]).splitlines() if each.startswith("| planted"))
    assert line.split(" | ")[1:5] == ["1", "1", "0", "1"]
    assert read_row(row.write(tmp_path / "rows")) == row


def test_an_engine_without_a_fault_passes(server: Server, tmp_path: Path) -> None:
    row = run(planted(server, tmp_path, "by_bytes"), tmp_path, 4, ("palette", "plain"), 2)
    assert len({*row.seeds}) == 2 and row.cases["plain"].cold is not None
    assert all(row.cases[name].passed for name in ("palette", "plain"))


def test_a_mix_up_that_is_not_repeated_is_suspected_only() -> None:
    case = ScoredCase("MIXED UP", "it says <b>", (3, 1, 0), False, ({"messages": []},))
    row = ScoredRow("engine", "1", "2026-11-30", "run", (1,), {"plain": case})
    assert case.suspected and not case.wrong and not case.passed
    assert "`plain` (the number that is drawn): suspected. it says &lt;b>" in page([row])
    assert replace(case, repeated=True).wrong


def test_what_the_model_does_not_read_is_not_passed() -> None:
    unread = ScoredCase("not judged", "the model does not read it", (4, 0, 0))
    assert not unread.passed and not unread.suspected
    assert replace(unread, cold=(3, 1, 0)).suspected


def test_the_worst_of_several_runs_counts() -> None:
    apart = ScoredCase("kept apart", "", (3, 0, 0))
    unread = ScoredCase("not judged", "unread", (2, 0, 1))
    wrong = ScoredCase("MIXED UP", "it says 1", (1, 2, 0), True, ({}, {}))
    assert combined([apart, unread, apart]) == replace(unread, cold=(8, 0, 1))
    assert combined([apart, wrong, unread]) == replace(wrong, cold=(6, 2, 1))


def test_what_an_engine_lacks_are_cases() -> None:
    assert {name for each in ENGINES for name in each.absent} <= {case.name for case in CASES}


def test_the_interpreter_of_an_engine_of_this_package_is_this_one() -> None:
    saccade = next(each for each in ENGINES if each.name == "saccade")
    assert saccade.python(Path("unused")) == Path(sys.executable)
