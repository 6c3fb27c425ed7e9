"""A reader of fields makes what it needs when it is first needed: a server has hundreds."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import pytest

from saccade.core.errors import InvalidRequest
from saccade.front.fields import Reader


def test_a_type_is_described_for_the_first_refusal_alone() -> None:
    reader: Reader[Literal["low", "high"]] = Reader(Literal["low", "high"])
    assert vars(reader).keys() == {"_kind"}, "nothing is made at import"
    assert reader.json(b'"low"', "detail") == "low"
    assert "_schema" not in vars(reader)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match='detail: only "high" or "low" is supported'):
            reader.json(b'"none"', "detail")
    assert "_schema" in vars(reader)


FIRST_USES = """
import sys, threading
from msgspec import defstruct
from saccade.front.fields import Reader

sys.setswitchinterval(1e-6)
for _ in range(60):
    inner = defstruct("Inner", [(f"field{i}", int | None, None) for i in range(40)])
    outer = defstruct("Outer", [("inner", inner), ("more", list[inner], [])])
    values = {"field39": 1}, {"inner": {"field39": 1}, "more": [{"field1": 2}]}
    readers = [(Reader(kind), value) for kind, value in zip((inner, outer), values)] * 2
    together = threading.Barrier(len(readers))

    def read(reader, value):
        together.wait()
        reader.value(value, "field")

    threads = [threading.Thread(target=read, args=each) for each in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("read")
"""


@pytest.mark.more
def test_threads_may_be_the_first_to_read_a_type_together() -> None:
    """msgspec ended the process where one used a class whose fields another looked up."""
    found = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "read\n"), found.stderr
