"""Tests that need a CUDA device: `make gpu-check`, or `pytest -m gpu`.

Elsewhere they are skipped.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> torch.device:
    """The device."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda")
