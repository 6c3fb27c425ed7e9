"""Saccade's paged attention behind transformers' attention interface.

Decoder layers call it instead of their own attention. It is the same for all models.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from saccade.kernels.reference.rotary import Rotation
from saccade.nn.protocol import Attention
from saccade.plugins.any_model.refusals import Unservable

NAME = "saccade_paged"
NEUTRAL = frozenset(
    {"dropout", "position_ids", "use_cache", "cache_position", "is_causal", "sliding_window"}
)
"""Arguments of layers that paged attention can ignore. The rotation has been applied already, and
windows are properties of the cache (`AttentionShape.window`), which `check.py` has compared with
the layers' masks.
"""
TURNED = 2
"""The number of values per head that the identity rotation covers."""


class PagedCall:
    """Paged attention for one forward pass, with an identity rotation.

    The identity rotation is needed because transformers' layers have already rotated queries and
    keys.
    """

    __slots__ = ("attention", "dim", "still")

    def __init__(self, attention: Attention, dim: int, tokens: int, device: torch.device) -> None:
        """Create the identity rotation for `tokens` rows.

        dim: the number of values per head.
        """
        self.attention = attention
        self.dim = dim
        ones = torch.ones((tokens, TURNED), device=device)
        self.still = Rotation(ones, torch.zeros_like(ones))


def paged_attention(
    module: Any,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    attention_mask: torch.Tensor | None = None,  # noqa: ARG001 - the KV cache determines the mask
    *,
    paged: PagedCall | None = None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Run paged attention, and return ([1, T, Hq, D], None). Attention weights are not computed.

    Raises Unservable for features that paged attention does not support.
    """
    name = type(module).__name__
    for word, meant in more.items():
        if word not in NEUTRAL and meant is not None and meant is not False:
            what = word if isinstance(meant, torch.Tensor) else f"{word} {meant}"
            raise Unservable(f"{name} needs {what}, which paged attention does not support")
    if paged is None:
        raise Unservable(f"{name} got no KV cache")
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] == paged.dim:
        raise Unservable(
            f"{name} has heads of {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]} values; "
            f"config.json has {paged.dim}"
        )
    usual = paged.dim**-0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    qkv = torch.cat((query, key, value), dim=1)[0].transpose(0, 1).contiguous()
    return paged.attention(qkv, paged.still, None, module.layer_idx)[None], None


AttentionInterface.register(NAME, paged_attention)
