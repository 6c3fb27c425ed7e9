"""Object files are loaded without LLVM: references to constants, to memory that changes, between
functions and to the C library; and what needs more of a linker is left to LLVM's.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.plugins.cpu import machine_code
from saccade.plugins.cpu.object_code import NotLoadable, load_code

binding = pytest.importorskip("llvmlite.binding", reason="llvmlite makes the object files")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="object files of x86-64 are loaded"
)

TEXT = """
@table = internal constant [4 x i64] [i64 3, i64 5, i64 7, i64 11]
@wide = internal constant <4 x i64> <i64 1, i64 2, i64 3, i64 4>, align 64
@turns = internal global i64 40
@more = common global i64 0, align 8

declare ptr @memset(ptr, i32, i64)
declare i64 @nobody(i64)

define void @fill(ptr %call) {
  %made = call ptr @memset(ptr %call, i32 1, i64 8)
  ret void
}

define void @look_up(ptr %call) {
  %index = load i64, ptr %call
  %place = getelementptr [4 x i64], ptr @table, i64 0, i64 %index
  %value = load i64, ptr %place
  %lane = trunc i64 %index to i32
  %vector = load <4 x i64>, ptr @wide, align 64
  %other = extractelement <4 x i64> %vector, i32 %lane
  %sum = add i64 %value, %other
  store i64 %sum, ptr %call
  ret void
}

define void @count(ptr %call) {
  %turns = load i64, ptr @turns
  %next = add i64 %turns, 1
  store i64 %next, ptr @turns
  %more = load i64, ptr @more
  %again = add i64 %more, 100
  store i64 %again, ptr @more
  %sum = add i64 %next, %again
  store i64 %sum, ptr %call
  ret void
}

define void @both(ptr %call) {
  call void @look_up(ptr %call)
  %found = load i64, ptr %call
  call void @count(ptr %call)
  %counted = load i64, ptr %call
  %sum = add i64 %found, %counted
  store i64 %sum, ptr %call
  ret void
}
"""
NAMES = ("fill", "look_up", "count", "both")


def made(text: str) -> bytes:
    code: bytes = machine_code._machine().emit_object(binding.parse_assembly(text))
    return code


def call(function: Callable[[int], None], number: int) -> int:
    block = (ctypes.c_int64 * 1)(number)
    function(ctypes.addressof(block))
    return int(block[0])


def test_code_finds_constants_memory_functions_and_the_c_library() -> None:
    code = made(TEXT)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    first, second = (
        {name: kind(at) for name, at in load_code(code, NAMES).items()} for _ in range(2)
    )
    assert [call(first["look_up"], each) for each in range(4)] == [4, 7, 10, 15]
    assert [call(first["count"], 0) for _ in range(3)] == [141, 242, 343]
    assert call(first["both"], 2) == 10 + 444
    assert call(second["count"], 0) == 141, "each has memory of its own"
    assert call(first["fill"], 0) == 0x0101010101010101


def test_code_may_not_be_written_where_it_runs() -> None:
    address = load_code(made(TEXT), ["fill"])["fill"]
    (line,) = (
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
    )
    assert line.split()[1].startswith("r-x")


@pytest.mark.parametrize("harm", ["nobody", "another format", "empty"])
def test_what_cannot_be_loaded_is_refused(harm: str) -> None:
    away = "define void @away(ptr %call) {\n  %a = call i64 @nobody(i64 1)\n  ret void\n}\n"
    code = {
        "nobody": lambda: made(TEXT + away),
        "another format": lambda: b"MZ" + made(TEXT)[2:],
        "empty": lambda: b"",
    }[harm]()
    with pytest.raises(NotLoadable):
        load_code(code, ["fill"])


def test_and_linked_by_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: bytes, names: object) -> dict[str, int]:
        raise NotLoadable("today")

    monkeypatch.setattr(machine_code, "load_code", refuse)
    linked = machine_code.link(made(TEXT), NAMES)
    assert call(linked["both"], 1) == 7 + 141
