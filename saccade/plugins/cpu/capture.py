"""Captures the calls of compiled kernels and PyTorch operations, and replays them without the
Python code between them, as a CUDA graph does. Consecutive kernels run in one call into compiled
code.

A capture owns its calls, and the memory of the tensors that they create. Work can be captured only
if its calls depend on shapes alone. As with a CUDA graph, reading a tensor's values in Python is an
error.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.kernels.reference.ops import Work
from saccade.plugins.cpu.capture_code import ENTRY, HEADER, NAME
from saccade.plugins.cpu.compiled_ops import find_compiled_op
from saccade.plugins.cpu.kernel import LISTENERS, parallel
from saccade.plugins.cpu.machine_code import Function, compiled

SYNCING_METHODS = frozenset(["tolist", "numpy", "__array__"])
"""Methods of a tensor that return its values to Python without running an operation."""
SYNCING_TAGS = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])
"""Tags of operations that return a value to Python, or whose output shape depends on values."""
ALIGNMENT = 64
"""Alignment of captured tensors in bytes."""
EMPTY = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])


class CaptureError(Exception):
    """Raised for work that cannot be captured because its calls may depend on a tensor's values."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A captured call of a PyTorch operation."""

    function: Callable[..., Any]
    given: Sequence[Any]  # positional arguments
    named: Mapping[str, Any]  # keyword arguments
    results: Sequence[torch.Tensor]  # the results are copied here; empty if it writes in place

    def __call__(self) -> None:
        made = self.function(*self.given, **self.named)
        for kept, new in zip(self.results, _tensors(made) if self.results else ()):
            kept.copy_(new)

    @classmethod
    def of(
        cls,
        function: Any,
        given: Sequence[Any],
        named: Mapping[str, Any],
        results: Sequence[torch.Tensor],
    ) -> Operation:
        """Return the captured call, as the operation's `out=` variant if there is one."""
        target = _out_variant(function)
        if target is None or len(results) != 1:
            return cls(function, given, named, results)
        same, name = target
        return cls(same, given, {**named, name: results[0]}, ())


class Calls:
    """Consecutive calls of compiled functions, which replay as one call."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, list[int], int]] = []
        self._memory = (ctypes.c_int64 * 0)()

    def add(self, function: Any, numbers: list[int], threads: int) -> None:
        self._calls.append((function, numbers, threads))

    def close(self) -> None:
        """Write the table of calls (`capture_code.HEADER`, ENTRY), followed by their arguments."""
        begin = parallel()
        table: list[ctypes.c_int64 | int]
        table = [0, len(self._calls), 0 if begin is None else _address(begin)]
        words = [number for _, numbers, _ in self._calls for number in numbers]
        behind = len(HEADER) + len(self._calls) * len(ENTRY)
        self._memory = (ctypes.c_int64 * (behind + len(words)))()
        at = ctypes.addressof(self._memory) + 8 * behind
        for function, numbers, threads in self._calls:
            table += _address(function), at, threads
            at += 8 * len(numbers)
        self._memory[:] = [*table, *words]

    def __call__(self) -> None:
        _run()(ctypes.addressof(self._memory))


class BufferPool:
    """Provides memory for the tensors of a capture. A released block is reused for the next tensor
    of the same size.

    So the layers of a model share the same blocks, which stay in a core's cache.
    """

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._free: defaultdict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def lend(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor with the shape, strides and dtype of `like`."""
        nbytes = like.untyped_storage().nbytes()
        size = -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
        free = self._free[size]
        block = free.pop() if free else self._take(size)
        lent = block[:]  # released with the last of the tensor and its views
        finalize(lent, free.append, block).atexit = False
        flat = torch.from_numpy(lent)[:nbytes].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _take(self, size: int) -> npt.NDArray[np.uint8]:
        memory = np.empty(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._blocks.append(memory)
        return memory[start : start + size]


class CapturedWork(TorchDispatchMode):
    """The captured calls of a function. `replay` repeats them on the same memory.

    The constructor runs the function `work` once to capture it. Tensors that exist before are used
    in place, so their owners must not move them. Raises CaptureError if a call may depend on a
    tensor's values.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.lent = BufferPool()
        self._kept: list[torch.Tensor] = []  # other tensors whose addresses the calls contain
        self.parts: list[Operation | Calls] = []
        self._thread = threading.get_ident()
        LISTENERS.append(self)
        try:
            with _NoSync(), self:
                self.results = work()
        finally:
            LISTENERS.remove(self)
        for part in self.parts:
            if isinstance(part, Calls):
                part.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that PyTorch does not import its compiler only to disable it in this
        mode.

        The import would delay the first response by a second.
        """
        return False

    def replay(self) -> None:
        for part in self.parts:
            part()

    def ran(self, function: Any, call: ctypes.Array[ctypes.c_int64], threads: int, /) -> None:
        if threading.get_ident() == self._thread:  # ignore kernels that other threads run
            self._add(function, call[:], threads)

    def _add(self, function: Any, numbers: list[int], threads: int) -> None:
        if not self.parts or not isinstance(self.parts[-1], Calls):
            self.parts.append(Calls())
        calls = self.parts[-1]
        assert isinstance(calls, Calls)
        calls.add(function, numbers, threads)

    def __torch_dispatch__(
        self,
        function: Any,
        _types: Any,
        given: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        named = named or {}
        made = function(*given, **named)
        tensors = _tensors(made)
        if not SYNCING_TAGS.isdisjoint(function.tags) or (function._schema.returns and not tensors):
            raise CaptureError(f"{function} reads a tensor's values in Python")
        if function._schema.is_mutable:
            self.parts.append(Operation(function, given, named, ()))
        elif function._schema.name.split("::")[1] in EMPTY:
            return self.lent.lend(made)
        elif not _views(tensors, given):
            self._kept.extend(tensors)
            if twin := find_compiled_op(function, given, named, tensors):
                self._kept.extend(_tensors(given))
                for code, numbers in twin:
                    self._add(code, numbers, 1)
            else:
                self.parts.append(Operation.of(function, given, named, tensors))
        return made


class _NoSync(TorchFunctionMode):
    """Raises CaptureError if Python reads a tensor's values."""

    def __torch_function__(
        self,
        function: Any,
        _types: Any,
        given: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        if function.__name__ in SYNCING_METHODS:
            raise CaptureError(f"{function.__name__} reads a tensor's values in Python")
        return function(*given, **(named or {}))


def _tensors(made: object) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    several = made if isinstance(made, (list, tuple)) else ()
    return [each for each in several if isinstance(each, torch.Tensor)]


@cache
def _out_variant(function: Any) -> tuple[Any, str] | None:
    """Return the `out=` variant of an operation and the name of its output argument, or `None` if
    there is none.
    """
    taken = [(argument.name, str(argument.type)) for argument in function._schema.arguments]
    packet = function.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        places = [each.name for each in other._schema.arguments if each.is_out]
        rest = [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out]
        if len(places) == 1 and rest == taken:
            return other, places[0]
    return None


def _views(made: Sequence[torch.Tensor], given: Sequence[Any]) -> bool:
    """Return True if all results share memory with the arguments."""
    known = {_memory(each) for each in given if isinstance(each, torch.Tensor)}
    return all(_memory(each) in known for each in made)


def _memory(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _run() -> Function:
    return compiled((NAME,), "capture_code")[NAME]
