"""Which tests need which instructions: any processor runs the others. And how many threads
compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from saccade.kernels.backend import find_backend
from saccade.kernels.ops import pick_ops
from saccade.kernels.processor import runs_int8

HAS_BACKEND = find_backend("cpu") is not None
"""Machine code is compiled for this machine's processor."""
FEW_BITS = pick_ops(torch.device("cpu"), torch.float32)
"""Operations on this machine for matrices in few bits."""

needs_int8 = pytest.mark.skipif(not runs_int8(), reason="the processor has no VNNI")
needs_vnni = pytest.mark.skipif(not FEW_BITS.takes_int4, reason="no AVX512-VNNI, or no llvmlite")

INT8 = pytest.param("int8", marks=needs_int8)
"""Matrices in 8 bits, by oneDNN's products or our own."""
COMPILED = [pytest.param(bits, marks=needs_vnni) for bits in ("int8", "int4")]
"""Matrices in few bits, by our own products."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
