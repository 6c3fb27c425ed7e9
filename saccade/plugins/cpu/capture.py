"""Work of compiled kernels and PyTorch's operations, recorded while it is done and repeated without
the Python between: kernels that follow each other run in one call into machine code.

Owns the recorded calls, and the memory that they read and write. Work can be recorded if its calls
depend on shapes alone. So a look from Python into a tensor ends it, as it ends the capture of a
CUDA graph.
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
"""Of a tensor: they give Python its values without an operation."""
SYNCING_TAGS = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])
"""Of operations: they give Python a value, or a shape that depends on values."""
ALIGNMENT = 64
"""Bytes at whose multiples tensors begin."""
EMPTY = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])


class CaptureError(Exception):
    """Work whose calls may depend on a tensor's values."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of PyTorch. results: the memory that gets its results; empty: it has its own."""

    function: Callable[..., Any]
    given: Sequence[Any]
    named: Mapping[str, Any]
    results: Sequence[torch.Tensor]

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
        """Return the operation, in the form that writes its result in place if it has one."""
        target = _out_variant(function)
        if target is None or len(results) != 1:
            return cls(function, given, named, results)
        same, name = target
        return cls(same, given, {**named, name: results[0]}, ())


class Calls:
    """Calls of machine code, one behind another."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, list[int], int]] = []
        self._memory = (ctypes.c_int64 * 0)()

    def add(self, function: Any, numbers: list[int], threads: int) -> None:
        self._calls.append((function, numbers, threads))

    def close(self) -> None:
        """Lay out all calls (`capture_code.HEADER`, ENTRY), and behind them their numbers."""
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
    """Memory for a recording's tensors. What one releases goes to the next of its size.

    A layer's work is in the memory of the layer before, in a core's cache.
    """

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._free: defaultdict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def lend(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor like this one, which is empty."""
        nbytes = like.untyped_storage().nbytes()
        size = -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
        free = self._free[size]
        block = free.pop() if free else self._take(size)
        lent = block[:]  # lives as long as the tensor and its views
        finalize(lent, free.append, block).atexit = False
        flat = torch.from_numpy(lent)[:nbytes].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _take(self, size: int) -> npt.NDArray[np.uint8]:
        memory = np.empty(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._blocks.append(memory)
        return memory[start : start + size]


class CapturedWork(TorchDispatchMode):
    """What `work` did, to be repeated by `replay`: the same calls over the same memory.

    Tensors that exist before belong to their owners, who keep them where they are. `work` is done
    once as it is recorded. Raises CaptureError where a call may depend on a tensor's values.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.lent = BufferPool()
        self._kept: list[torch.Tensor] = []  # what else addresses point to
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
        """Return False: no compiler sees this mode, so PyTorch need not import its own to skip it.

        The import takes a second of the first answer.
        """
        return False

    def replay(self) -> None:
        for part in self.parts:
            part()

    def ran(self, function: Any, call: ctypes.Array[ctypes.c_int64], threads: int, /) -> None:
        if threading.get_ident() == self._thread:  # else another's work
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
    """Raises CaptureError where Python would see a tensor's values."""

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
    """Return the same operation with a place for its result, and that argument's name."""
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
    """Return True if all results are views of the arguments."""
    known = {_memory(each) for each in given if isinstance(each, torch.Tensor)}
    return all(_memory(each) in known for each in made)


def _memory(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _run() -> Function:
    return compiled((NAME,), "capture_code")[NAME]
