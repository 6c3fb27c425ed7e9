"""Rotary embeddings that transformers changes as soon as a forward call has a longer text.

Here one way is kept from the load on, since a call has rows from several texts. The same code
serves all models.
"""

from __future__ import annotations

from typing import Any

import torch

from saccade.core.errors import CheckpointError
from saccade.plugins.any_model.refusals import LONGROPE


def keep_rope(decoder: Any, near: int, long: bool) -> None:
    """Have `decoder` rotate all texts as it does those up to `near` tokens.

    `long`: as it does longer ones. Raises CheckpointError if it has no such embedding.
    """
    found = [each for each in decoder.modules() if vars(each).get("rope_type") == LONGROPE]
    if not found:
        raise CheckpointError(f"{type(decoder).__name__} has no rotary embedding for long texts")
    for each in found:
        device = next(each.buffers()).device
        each(torch.zeros(1, device=device), torch.tensor([[near if long else 0]], device=device))
        each.rope_type = "as in that call"
