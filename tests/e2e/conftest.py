"""What several files ask: a fleet on Ray Serve, which takes long to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.rays import RayFleet


@pytest.fixture(scope="session")
def ray_fleet(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayFleet]:
    """Two servers, where Ray is installed."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    from tests.e2e.rays import deployed

    with deployed(checkpoint("qwen3_vl"), tmp_path_factory.mktemp("r"), 2) as fleet:
        print(f"\nready after {fleet.started:.1f} s; Ray's own processes: {fleet.bytes >> 20} MiB")
        yield fleet
