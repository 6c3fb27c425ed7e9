"""Fixtures that several rooms' tests share: tiny checkpoints, made once per session, and
transformers on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Read when torch is first imported: threads that wait must not spin on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from tests.checkpoints import FamilyName, Reference


@pytest.fixture(scope="session", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> FamilyName:
    """Each family in turn."""
    name: FamilyName = request.param
    return name


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family, **options of make_checkpoint)`: a folder, the same for the same
    arguments.
    """
    from tests.checkpoints import make_checkpoint

    @cache
    def make(family: FamilyName, **options: object) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[..., Path]) -> Callable[..., Reference]:
    """`reference(family, **options of make_checkpoint)`: transformers on that checkpoint, float32,
    one thread.
    """
    import torch

    from tests.checkpoints import reference as load

    torch.set_num_threads(1)

    @cache
    def make(family: FamilyName, **options: object) -> Reference:
        return load(checkpoint(family, **options))

    return make
