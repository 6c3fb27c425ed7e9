"""The Hadamard transform of blocks of adjacent inputs, which spreads outliers over their block.

If rows and matrix are both transformed, their product is unchanged except for a constant factor.
But quantizing them to 8 bits loses less, because an outlier no longer forces a coarse scale on all
other values of its row.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

BLOCKS = (64, 128, 256, 512)
"""Supported block sizes of the transform."""
MIN_BLOCK = BLOCKS[0]
"""Inputs are padded to a multiple of this."""


def block_of(inputs: int) -> int:
    """Return the block size for this number of inputs, a multiple of `MIN_BLOCK`.

    Larger blocks spread outliers further, but must divide the number of inputs.
    """
    return min(inputs & -inputs, BLOCKS[-1])


def transform(x: torch.Tensor) -> torch.Tensor:
    """Return x, padded to complete blocks and transformed, in float32 [T, inputs].

    Transforming twice multiplies values by the block size (`block_of`). The order of operations
    makes the result bit-identical to that of the x86 kernel.
    """
    wide = F.pad(x.float(), (0, -x.shape[1] % MIN_BLOCK))
    shape, block, step = wide.shape, block_of(wide.shape[1]), 1
    while step < block:
        first, second = wide.view(-1, 2, step).unbind(1)
        wide = torch.stack((first + second, first - second), 1)
        step *= 2
    return wide.reshape(shape)


def transform_back(x: torch.Tensor, inputs: int) -> torch.Tensor:
    """Undo `transform`, except for a factor of the block size, and remove the padding."""
    return transform(x)[:, :inputs]
