"""Attention over paged keys and values.

Owns nothing; knows nothing of sequences or pages beyond kv slot numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Context:
    """One sequence's part of a batch: query rows [start, start + length) attend to its first `kv_length` tokens.

    The query rows are the last `length` of those `kv_length` tokens (causal, lower right).
    `slots` are the kv slots of the tokens in order, an int64 tensor [kv_length]; `run` is the first slot where they are
    consecutive (so that a slice can stand for a gather), else -1.
    """

    start: int
    length: int
    kv_length: int
    slots: torch.Tensor
    run: int
