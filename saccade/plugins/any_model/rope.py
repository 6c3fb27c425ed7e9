"""Fixes rotary embeddings that transformers would switch depending on the longest text of a call.

In Saccade, a call has tokens of several texts, so one set of factors is selected at load. The code
is the same for all models.
"""

from __future__ import annotations

from typing import Any

import torch

from saccade.core.errors import CheckpointError
from saccade.plugins.any_model.refusals import LONGROPE


def keep_rope(decoder: Any, near: int, long: bool) -> None:
    """Make `decoder` rotate all prompts like prompts of up to `near` tokens.

    long: rotate them like longer prompts instead.

    Raises CheckpointError if the decoder has no rotary embedding of this type.
    """
    found = [each for each in decoder.modules() if vars(each).get("rope_type") == LONGROPE]
    if not found:
        raise CheckpointError(f"{type(decoder).__name__} has no rotary embedding for long texts")
    for each in found:
        device = next(each.buffers()).device
        each(torch.zeros(1, device=device), torch.tensor([[near if long else 0]], device=device))
        each.rope_type = "as in that call"
