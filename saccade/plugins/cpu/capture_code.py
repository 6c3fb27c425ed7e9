"""LLVM IR for the loop that replays captured calls."""

from __future__ import annotations

NAME = "run_calls"
HEADER = ("next", "count", "parallel")
"""The first fields of a table of calls: 0, the number of calls, and the address of GOMP_parallel,
or 0 if there is none. The entries for the calls follow.
"""
ENTRY = ("function", "call", "threads")
"""The fields of an entry: the addresses of the function and of its arguments, and the number of
threads.
"""

TEXT = """
define void @run_calls(ptr %record) {
begin:
  %count.at = getelementptr i64, ptr %record, i64 1
  %count = load i64, ptr %count.at
  %parallel.at = getelementptr i64, ptr %record, i64 2
  %parallel = load ptr, ptr %parallel.at
  %first = getelementptr i64, ptr %record, i64 3
  br label %test

test:
  %index = phi i64 [0, %begin], [%following, %done]
  %entry = phi ptr [%first, %begin], [%behind, %done]
  %left = icmp slt i64 %index, %count
  br i1 %left, label %call, label %end

call:
  %function = load ptr, ptr %entry
  %numbers.at = getelementptr i64, ptr %entry, i64 1
  %numbers = load ptr, ptr %numbers.at
  %threads.at = getelementptr i64, ptr %entry, i64 2
  %threads = load i64, ptr %threads.at
  store i64 0, ptr %numbers  ; no piece of its work is taken
  %alone = icmp slt i64 %threads, 2
  br i1 %alone, label %single, label %several

single:
  call void %function(ptr %numbers)
  br label %done

several:
  %abreast = trunc i64 %threads to i32
  call void %parallel(ptr %function, ptr %numbers, i32 %abreast, i32 0)
  br label %done

done:
  %following = add i64 %index, 1
  %behind = getelementptr i64, ptr %entry, i64 3
  br label %test

end:
  ret void
}
"""


def assembly(triple: str) -> str:
    """Return LLVM IR for the function, which takes the address of a table of calls."""
    return f'target triple = "{triple}"\n{TEXT}'
