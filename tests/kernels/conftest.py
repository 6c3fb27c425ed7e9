"""Where Triton kernels run in tests: on a GPU, else in its interpreter (`conftest.py`), whose
conversion to 8 bits is mended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from saccade_bench.fixtures.interpreter import mend_interpreter
from tests.helpers import breadth

HAS_GPU = torch.cuda.is_available()
COARSER = {torch.float32: 8.0, torch.float16: 2.0}
"""On a GPU exponentials are approximate, and sums have another order."""


def bounds(single: float, half: float) -> dict[torch.dtype, float]:
    """By number format, how far a kernel may be from its reference in the interpreter, as told, and
    on a GPU, where bfloat16 is right too.
    """
    told = {torch.float32: single, torch.float16: half}
    if not HAS_GPU:
        return told
    return {dtype: bound * COARSER[dtype] for dtype, bound in told.items()} | {
        torch.bfloat16: 24 * half  # three bits fewer, and rounded more often
    }


def broad(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """All cases are in the default run of a GPU, which has them in no time."""
    return [*cases] if HAS_GPU else breadth.broad(cases, keep)


@pytest.fixture(scope="package", autouse=True)
def overflow() -> Iterator[None]:
    """An exponential that is too large is infinite, as on a GPU: on some processors NumPy warns."""
    with np.errstate(over="ignore"):
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Of the tensors that kernels are given."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="package", autouse=True)
def rounding() -> Iterator[None]:
    """Values become FP8 as PyTorch has it: the interpreter forgets the carry when it rounds up, so
    that 1.97 becomes 1.
    """
    if find_spec("triton") is None:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    its = interpreter._convert_float

    def convert(values: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        if wanted != tl.float8e4nv or kind not in (tl.float32, tl.float16):
            return its(values, kind, wanted, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(values)).float()
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


if not HAS_GPU:
    mend_interpreter()
