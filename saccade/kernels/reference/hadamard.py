"""Hadamard's transform of neighbouring inputs, block by block: it spreads a large value over its
block.

Rows and matrices that are both transformed have the same product as before. Rounded to 8 bits, both
then lose less: a row with one large value no longer rounds all its others coarsely.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

BLOCKS = (64, 128, 256, 512)
"""Supported block sizes of the transform."""
MIN_BLOCK = BLOCKS[0]
"""Inputs are padded to a multiple of so many."""


def block_of(inputs: int) -> int:
    """Return how many of the inputs, a multiple of `MIN_BLOCK`, are transformed together.

    More spread a large value further. Only all inputs in whole blocks are transformed.
    """
    return min(inputs & -inputs, BLOCKS[-1])


def transform(x: torch.Tensor) -> torch.Tensor:
    """Return float32 [T, inputs to whole blocks], each block by sums and differences.

    Done twice, a block is as many times what it was as it has inputs (`block_of`). The order is the
    x86 code's, to the bit.
    """
    wide = F.pad(x.float(), (0, -x.shape[1] % MIN_BLOCK))
    shape, block, step = wide.shape, block_of(wide.shape[1]), 1
    while step < block:
        first, second = wide.view(-1, 2, step).unbind(1)
        wide = torch.stack((first + second, first - second), 1)
        step *= 2
    return wide.reshape(shape)


def transform_back(x: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return what `transform(...)` was made of, divided by a block's inputs, without padding."""
    return transform(x)[:, :inputs]
