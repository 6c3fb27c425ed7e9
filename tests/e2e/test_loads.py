"""The files that the processes of a default server import are those that `tests/loads.txt` names
(`tests/e2e/walks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.e2e.walks import BY_MACHINE, COMMAND, LATER, TESTS, Listed, Measured, read, rewrite

pytestmark = pytest.mark.more

TEXT = f"""# A list
lines of front: 100
lines of engine: 18

a.py: front engine
b.py: engine
{LATER}
c.py: front - it is needed

{BY_MACHINE}
plugins/cpu/amx.py
"""


def loads(front: Iterable[str], engine: Iterable[str], lines: int = 50) -> Measured:
    """Files of so many lines each."""
    return Measured(
        "lines", {"front": dict.fromkeys(front, lines), "engine": dict.fromkeys(engine, 9)}
    )


AS_LISTED = loads({"a.py", "c.py"}, {"a.py", "b.py"})


def test_a_server_imports_the_files_that_are_named(
    measured: tuple[Measured, Measured], capsys: pytest.CaptureFixture[str]
) -> None:
    _, loads = measured
    with capsys.disabled():
        print(f"\n{loads.describe()}", end="")
    differences = read((TESTS / "loads.txt").read_text()).differences(loads)
    assert not differences, "\n".join(("tests/loads.txt:", *differences))


def test_a_list_is_read() -> None:
    assert read(TEXT) == Listed(
        {"a.py": {"front", "engine"}, "b.py": {"engine"}, "c.py": {"front"}},
        {"plugins/cpu/amx.py"},
        {"front": 100, "engine": 18},
        [],
    )


def test_every_difference_is_found() -> None:
    assert not read(TEXT).differences(AS_LISTED)
    front = {"a.py", "d.py", "plugins/cpu/amx.py", "plugins/cpu/new.py"}
    assert read(TEXT).differences(loads(front, {"a.py", "b.py"}, 40)) == [
        f"d.py: front: new: give it a line with its reason ({COMMAND})",
        f"plugins/cpu/new.py: front: new: give it a line with its reason ({COMMAND})",
        f"c.py: front: gone: remove it from the list ({COMMAND})",
        "lines of front: 120, listed are 100",
    ]


def test_a_list_is_rewritten_and_asks_for_reasons() -> None:
    """A kernel that only some machines enter is listed by machine, and reasons stay."""
    assert rewrite(TEXT, AS_LISTED, [AS_LISTED]) == TEXT
    usual = loads({"a.py", "c.py", "d.py", "plugins/cpu/dense.py", "kernels/ops.py"}, {"b.py"})
    other = loads({"a.py", "c.py", "d.py", "plugins/cpu/paged.py", "kernels/ops.py"}, {"b.py"})
    text = rewrite(TEXT, usual, [other])
    assert (
        text
        == f"""# A list
lines of front: 200
lines of engine: 9

a.py: front
b.py: engine
{LATER}
c.py: front - it is needed
d.py: front
kernels/ops.py: front

{BY_MACHINE}
plugins/cpu/amx.py
plugins/cpu/dense.py
plugins/cpu/paged.py
"""
    )
    assert read(text).differences(usual) == ["d.py: give a reason", "kernels/ops.py: give a reason"]
