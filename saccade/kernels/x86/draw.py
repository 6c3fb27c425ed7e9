"""Draws of a few rows in machine code, without a sort: the bounds of a draw are found among weights
by halving. What rounding could decide is left to PyTorch, as in `reference/few_rows.py`.

Knows one row at a time. Owns the memory for its weights.
"""

from __future__ import annotations

from functools import cache

import torch

from saccade.kernels.reference.few_rows import MOST_SORTED, ROUNDING, UNLIKELY, DrawParams
from saccade.kernels.x86.draw_call import UNDECIDED
from saccade.kernels.x86.kernel import Kernel, bits, bits_of


def compiled_draw(logits: torch.Tensor, params: DrawParams, point: float) -> int | None:
    """Do as `few_rows.draw_few`."""
    vocab = len(logits)
    weights, kept, token = _scratch(vocab)
    _draw()(
        1,
        vocab,
        logits.data_ptr(),
        weights.data_ptr(),
        token.data_ptr(),
        vocab,
        params.top_k,
        *map(bits_of, (params.temperature, params.top_p, params.min_p, point, ROUNDING)),
        kept.data_ptr(),
        MOST_SORTED,
        bits(UNLIKELY),
    )
    drawn = int(token[0])
    return None if drawn == UNDECIDED else drawn


@cache
def _scratch(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty(vocab), torch.empty(MOST_SORTED), torch.empty(1, dtype=torch.int64)


@cache
def _draw() -> Kernel:
    return Kernel("draw_code", "draw")
