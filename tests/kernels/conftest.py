"""Where Triton kernels run in tests: on a GPU, else in its interpreter (`tests/conftest.py`)."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="session")
def device() -> str:
    """Of the tensors that kernels are given."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return "cuda" if HAS_GPU else "cpu"


def mend_interpreter() -> None:
    """Triton 3.6, which torch 2.11 comes with, makes an index of an array [1] by int(), which numpy
    has refused since 2.4: its interpreter could run no loop.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


if not HAS_GPU and find_spec("triton") and version("triton").startswith("3.6."):
    mend_interpreter()
