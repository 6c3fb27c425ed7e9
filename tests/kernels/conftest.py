"""Where Triton kernels run in tests: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # before anything imports a kernel
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    """Of the tensors that kernels are given."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return "cuda" if HAS_GPU else "cpu"
