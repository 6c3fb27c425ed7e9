"""Which tests need which instructions: any processor runs the others. And how many threads
compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from saccade.kernels.reference.int8 import runs_int8
from saccade.kernels.x86.vnni import runs_vnni

needs_int8 = pytest.mark.skipif(not runs_int8(), reason="the processor has no VNNI")
needs_vnni = pytest.mark.skipif(not runs_vnni(), reason="no AVX512-VNNI, or no llvmlite")

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
