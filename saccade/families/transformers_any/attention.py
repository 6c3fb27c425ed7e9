"""Our paged attention in transformers' attention interface: what a decoder layer calls in place of
its own. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from saccade.core.errors import CheckpointError
from saccade.families.transformers_any.spec import AnySpec
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.protocol import Attention, Batch, DeltaInputs, Recurrence
from saccade.nn.weights import Weights

NAME = "saccade_paged"
NEUTRAL = frozenset({"dropout", "position_ids", "use_cache", "cache_position", "is_causal"})
"""What layers say beside, and what changes nothing here: positions are turned already."""
TURNED = 2
"""Values of a head that are turned, by no angle."""


class PagedCall:
    """One forward pass: the attention, and a rotation by nothing, for layers have turned queries
    and keys themselves.
    """

    __slots__ = ("attention", "dim", "still")

    def __init__(self, attention: Attention, dim: int, tokens: int, device: torch.device) -> None:
        """dim: values of a head."""
        self.attention = attention
        self.dim = dim
        ones = torch.ones((tokens, TURNED), device=device)
        self.still = Rotation(ones, torch.zeros_like(ones))


def paged_attention(
    module: Any,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    _mask: torch.Tensor | None,
    *,
    paged: PagedCall | None = None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """([1, T, Hq, D], no weights). Raises CheckpointError for what our attention does not do."""
    name = type(module).__name__
    for word, meant in more.items():
        if word not in NEUTRAL and meant is not None and meant is not False:
            what = word if isinstance(meant, torch.Tensor) else f"{word} {meant}"
            raise CheckpointError(f"{name} asks for {what}, which paged attention has not")
    if paged is None:
        raise CheckpointError(f"{name} is not told where its keys and values are kept")
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] == paged.dim:
        raise CheckpointError(
            f"{name} has heads of {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]} values; "
            f"config.json says {paged.dim}"
        )
    usual = paged.dim**-0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    qkv = torch.cat((query, key, value), dim=1)[0].transpose(0, 1).contiguous()
    return paged.attention(qkv, paged.still, None, module.layer_idx)[None], None


AttentionInterface.register(NAME, paged_attention)


class Tally:
    """An attention that counts its calls, of one token; implements `nn.protocol.Attention`."""

    def __init__(self, heads: int) -> None:
        """heads: of queries."""
        self.layers: list[tuple[int, int]] = []
        self._heads = heads

    @property
    def recurrence(self) -> Recurrence:
        return NoRecurrence()

    def plan(self, batch: Batch) -> None: ...

    def __call__(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,  # noqa: ARG002 - the protocol's name
        qk_norm: QKNorm | None,  # noqa: ARG002
        layer: int,
    ) -> torch.Tensor:
        self.layers.append((layer, qkv.shape[1]))
        return qkv[:, : self._heads]

    def read(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("transformers' layers have keys and values of their own")

    over_latents = read


class NoRecurrence:
    """Implements `nn.protocol.Recurrence`."""

    def __call__(self, inputs: DeltaInputs, layer: int) -> torch.Tensor:  # noqa: ARG002
        raise AssertionError("transformers' layers know no states of ours")


def one_token(
    spec: AnySpec,
    run: Callable[[torch.Tensor, torch.Tensor, PagedCall], torch.Tensor],
    weights: Weights,
) -> None:
    """Pass one token through all layers. Raises CheckpointError unless each asks once for
    attention, of the heads that the caches are made for.
    """
    text = spec.facts.text
    tally, device = Tally(text.heads), weights.device
    x = torch.zeros((1, text.hidden), dtype=weights.dtype, device=device)
    positions = torch.zeros((text.axes, 1), dtype=torch.int64, device=device)
    run(x, positions, PagedCall(tally, text.head_dim, 1, device))
    wanted = [(layer, text.heads + 2 * text.kv_heads) for layer in range(text.layers)]
    if tally.layers != wanted:
        raise CheckpointError(
            f"{spec.folder}: {spec.facts.architecture} is not served: its layers ask for attention "
            f"as {tally.layers} (layer, heads), not once each as {wanted}: they keep what pages do "
            "not hold"
        )
