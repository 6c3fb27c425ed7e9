"""Orders and packs of patches that several vision towers share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of rows, one below another; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def merged_order(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each patch, [height * width] each, where the merge x merge patches of a
    token stand together.
    """
    places = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    row, column = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return row, column
