"""A stand-in for a GPU where there is none: tensors that say `cuda`, and are computed on the CPU.

An operation on tensors of both devices raises, as CUDA does: but for numbers [], copies, and
indices on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda", 0)
CROSSING = frozenset({"to", "_to_copy", "copy_", "__getitem__", "__setitem__", "index_put_"})
"""What takes tensors of both."""
LEAVING = frozenset({"cpu", "item", "tolist"})
"""What ends on the CPU."""


class OnGpu(torch.Tensor):
    """A tensor whose values are `held`, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=torch.device("meta")
        )
        made.held = held
        return made

    def __repr__(self, *, _: Any = None) -> str:  # type: ignore[override]
        return f"OnGpu({self.held!r})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return run(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(func, args, dict(kwargs or {}))


class Pretended(TorchDispatchMode):
    """Makes tensors that are asked for on `cuda`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(func, args, dict(kwargs or {}))


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what is asked of either device."""
    leaves = tree_flatten((args, kwargs))[0]
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    devices = [each for each in leaves if is_device(each)]
    there = [isinstance(each, OnGpu) for each in tensors]
    name = func.__name__.partition(".")[0]
    if name == "_has_compatible_shallow_copy_type":  # asks whether a module keeps its parameter
        return all(there)
    if any(there) and name not in CROSSING:
        for each in tensors:
            if not isinstance(each, OnGpu) and each.dim():
                raise RuntimeError(f"{name}: tensors on cuda:0 and cpu, {list(each.shape)}")
    target = torch.device(devices[0]).type == "cuda" if devices else any(there)
    if name == "copy_":
        target = isinstance(args[0], OnGpu)
    made = func(*tree_map(held, args), **tree_map(held, kwargs))
    if not target or name in LEAVING:
        return made
    known = {id(each.held): each for each in tensors if isinstance(each, OnGpu)}

    def wrapped(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        return known[id(each)] if id(each) in known else OnGpu(each)

    return tree_map(wrapped, made)


def is_device(each: Any) -> bool:
    return isinstance(each, torch.device) or (isinstance(each, str) and each in ("cuda", "cpu"))


def held(each: Any) -> Any:
    """Return the tensor, or device, that stands behind one on the GPU."""
    if isinstance(each, OnGpu):
        return each.held
    return torch.device("cpu") if is_device(each) and torch.device(each).type == "cuda" else each


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let tensors be on `cuda` within the block."""
    with (
        patch("torch.cuda._lazy_init"),
        patch("torch.cuda.get_device_capability", lambda _: (9, 0)),
        patch("torch.inference_mode", torch.no_grad),  # in which subclasses have no versions
        Pretended(),
    ):
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=)`
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
