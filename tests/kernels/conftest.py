"""Where Triton kernels run in tests: on a GPU, else in its interpreter (`tests/conftest.py`)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="session")
def device() -> str:
    """Of the tensors that kernels are given."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return "cuda" if HAS_GPU else "cpu"
