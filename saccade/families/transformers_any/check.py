"""What is asked of a model's modules before it is served: one token through all layers, by our
caches' attention and by the model's own forward.

Each layer must ask once for attention, with the heads and the window that caches are made for; the
logits must be those of the model's own forward, which shows a factor, a cap or a sink that nothing
here applies. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from saccade.core.errors import CheckpointError
from saccade.families.transformers_any.attention import PagedCall, paged_attention
from saccade.families.transformers_any.spec import AnySpec
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.protocol import Batch, DeltaInputs, Recurrence

NAME = "saccade_counted"
OTHERWISE = 0
"""Stands for a mask that is no window: no token sees so few."""
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Two ways to the same logits may differ by this share of their size."""


def shown_mask(*, mask_function: Callable[..., torch.Tensor], config: Any, **_: Any) -> Any:
    """In place of a mask: how many tokens the last one of the longest text sees, [1, 1, 1, 1]."""
    context = config.max_position_embeddings
    nothing, places = torch.zeros((1, 1), dtype=torch.int64), torch.arange(context)[None]
    last = torch.tensor([[context - 2], [context - 1]])
    try:
        seen = mask_function(nothing, nothing, last, places).expand(2, context)
    except (IndexError, RuntimeError):  # it reads what is said of each token
        return torch.full((1, 1, 1, 1), OTHERWISE)
    count = int(seen[1].sum())
    window = (places <= last) & (places > last - count)
    return torch.full((1, 1, 1, 1), count if torch.equal(seen, window) else OTHERWISE)


def counted_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    paged: PagedCall | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """`paged_attention` with a `Tally`, which is told of the layer's mask."""
    made = paged_attention(module, query, key, value, None, paged=paged, **more)
    assert paged is not None and isinstance(paged.attention, Tally)
    paged.attention.sees.append(None if mask is None else int(mask.flatten()[0]))
    return made


AttentionInterface.register(NAME, counted_attention)
AttentionMaskInterface.register(NAME, shown_mask)


class Tally:
    """An attention that counts its calls, of one token, which sees itself; implements
    `nn.protocol.Attention`. sees: of each call, as `shown_mask` says it; None: there is no mask.
    """

    def __init__(self, heads: int, kv_heads: int) -> None:
        """heads: of queries."""
        self.layers: list[tuple[int, int]] = []
        self.sees: list[int | None] = []
        self._heads, self._kv_heads = heads, kv_heads

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
        group = self._heads // self._kv_heads
        return qkv[:, self._heads + self._kv_heads :].repeat_interleave(group, dim=1)

    def read(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("transformers' layers have keys and values of their own")

    over_latents = read


class NoRecurrence:
    """Implements `nn.protocol.Recurrence`."""

    def __call__(self, inputs: DeltaInputs, layer: int) -> torch.Tensor:  # noqa: ARG002
        raise AssertionError("transformers' layers know no states of ours")


def counted_token(
    spec: AnySpec, run: Callable[[torch.Tensor, torch.Tensor, PagedCall], torch.Tensor], x: Any
) -> torch.Tensor:
    """Pass one token's embedding x [1, hidden] through all layers, whose attention is `NAME`'s; its
    state [1, hidden]. Raises CheckpointError for a layer that asks for other caches than there are.
    """
    text = spec.facts.text
    tally = Tally(text.heads, text.kv_heads)
    positions = torch.zeros((text.axes, 1), dtype=torch.int64, device=x.device)
    state = run(x, positions, PagedCall(tally, text.head_dim, 1, x.device))
    wanted = [(layer, text.heads + 2 * text.kv_heads) for layer in range(text.layers)]
    what = f"{spec.folder}: {spec.facts.architecture} is not served: "
    if tally.layers != wanted:
        raise CheckpointError(
            f"{what}its layers ask for attention as {tally.layers} (layer, heads), not once each "
            f"as {wanted}: they keep what pages do not hold"
        )
    windows = text.windows or (None,) * text.layers
    for layer, (sees, window) in enumerate(zip(tally.sees, windows, strict=True)):
        if (sees or text.context_length) != (window or text.context_length) or sees == OTHERWISE:
            seen = f"the last {sees} tokens" if sees else "tokens by a rule that no cache here has"
            raise CheckpointError(
                f"{what}its layer {layer} sees {seen}; its configuration says "
                f"{window or 'all tokens'}"
            )
    return state


def same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """True if two ways to a token's logits differ by rounding alone."""
    apart = (ours.float() - theirs.float()).norm()
    return bool(apart <= ROUNDING[theirs.dtype] * theirs.float().norm())
