"""Arrays and tensors next to a guard page: a read or write out of bounds ends the process. Also a
pytest plugin that gives tests only such memory (`-p tests.helpers.guarded`). `SIDE` in the
environment selects the side of the guard page. The plugin prints which machine code ran, and hides
the CPU flags that `HIDDEN` lists.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from saccade.plugins.cpu import cpu_info, machine_code
from saccade.plugins.cpu.kernel import LISTENERS, Kernel

Side = Literal["begin", "end"]
"""The side of the guard page: before the first byte, or behind the last one."""
SIDES: tuple[Side, ...] = ("begin", "end")
SIDE = "SACCADE_TEST_GUARDED"
PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PROT_NONE = 0
MOVED = pytest.StashKey[int]()
HIDDEN = "SACCADE_TEST_HIDDEN_FLAGS"
"""Flags of /proc/cpuinfo, with commas between."""


def guarded_bytes(count: int, side: Side) -> npt.NDArray[np.uint8]:
    """Return zeros that begin or end at a guard page. Has pages at both sides, so
    that the other one is near, too.
    """
    pages = -(-count // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    whole = np.frombuffer(memory, np.uint8)
    for page in (0, pages + 1):
        if _LIBC.mprotect(whole.ctypes.data + page * PAGE, PAGE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    first = PAGE if side == "begin" else (pages + 1) * PAGE - count
    return whole[first : first + count]


def guarded_empty(shape: Any, dtype: Any, side: Side) -> npt.NDArray[Any]:
    """Return a guarded array."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape)) * kind.itemsize
    return guarded_bytes(count, side).view(kind).reshape(shape)


def guarded_copy(array: npt.NDArray[Any], side: Side) -> npt.NDArray[Any]:
    """Return an array's values in a guarded one."""
    made = guarded_empty(array.shape, array.dtype, side)
    made[...] = array
    return made


class GuardedTensors(TorchDispatchMode):
    """Moves the memory of every tensor that PyTorch creates next to a guard page."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self._side = side
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        fresh = func is torch.ops.aten.lift_fresh.default
        given = set() if fresh else {*map(_memory_of, tree_iter((args, kwargs)))}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if _memory_of(tensor) in given else self._move(tensor)

        return tree_map_only(torch.Tensor, move, made)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        if not storage.resizable():
            return tensor  # an array's memory, by `from_numpy`: its owner may use it again
        memory = torch.from_numpy(guarded_bytes(storage.nbytes(), self._side)).untyped_storage()
        memory.copy_(storage)
        self.moved += 1
        where = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(memory, *where)


def _memory_of(value: object) -> int | None:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return value.untyped_storage().data_ptr()
    return None


class CodeListener:
    """Counts the calls of machine code by its file and function, those of recordings too."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._names: dict[int | None, str] = {}

    def ran(self, function: Any, call: object = None, threads: int = 1) -> None:
        self.calls[self._names[_address(function)]] += 1

    def name(self, file: str, functions: Mapping[str, Any]) -> None:
        """Remember what the functions of a file are called."""
        for name, function in functions.items():
            self._names[_address(function)] = f"{file}.{name}"


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _listen(listener: CodeListener) -> None:
    """Name whatever is compiled from now on. Comes before any caller's own import."""
    compiled, make = machine_code.compiled, Kernel.__init__

    def named(names: Sequence[str], code: str, *more: Any) -> Mapping[str, Any]:
        functions = compiled(names, code, *more)
        listener.name(code, functions)
        return functions

    def made(kernel: Kernel, code: str, name: str, *sizes: int) -> None:
        make(kernel, code, name, *sizes)
        listener.name(code, {name: kernel.function})

    vars(machine_code)["compiled"] = named
    Kernel.__init__ = made  # type: ignore[method-assign,assignment]


def _guard_recordings(listener: CodeListener, side: Side) -> None:
    """Guard the memory that recordings lend, and hear of what they repeat."""
    from saccade.plugins.cpu import capture

    repeat = capture.Calls.__call__

    def heard(calls: capture.Calls) -> None:
        repeat(calls)
        listener.ran(capture._run())
        for function, _, _ in calls._calls:
            listener.ran(function)

    def take(pool: capture.BufferPool, size: int) -> npt.NDArray[np.uint8]:
        pool._blocks.append(guarded_bytes(size, side))
        return pool._blocks[-1]

    capture.Calls.__call__ = heard  # type: ignore[method-assign,assignment]
    capture.BufferPool._take = take  # type: ignore[method-assign,assignment]


LISTENER = CodeListener()
if SIDE in os.environ:
    _listen(LISTENER)
    _guard_recordings(LISTENER, "begin" if os.environ[SIDE] == "begin" else "end")
if HIDDEN in os.environ:
    LEFT = cpu_info.flags() - {*os.environ[HIDDEN].split(",")}
    vars(cpu_info)["flags"] = lambda: LEFT


@pytest.fixture(autouse=SIDE in os.environ)
def guards(pytestconfig: pytest.Config) -> Iterator[None]:
    """Guard the tensors of a test."""
    side: Any = os.environ[SIDE]
    LISTENERS.append(LISTENER)
    with GuardedTensors(side) as mode:
        yield
    LISTENERS.remove(LISTENER)
    pytestconfig.stash[MOVED] = pytestconfig.stash.get(MOVED, 0) + mode.moved


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name, count in sorted(LISTENER.calls.items()):
        terminalreporter.write_line(f"machine code: {name} {count}")
    terminalreporter.write_line(f"guarded tensors: {config.stash.get(MOVED, 0)}")
