"""Checks the layers of a model before it is served.

Passes one token through all layers. Each layer must call attention once, with the heads and the
window that the KV cache is created for. The check is the same for all models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.protocol import Batch, DeltaInputs, Recurrence
from saccade.plugins.any_model.attention import PagedCall, paged_attention
from saccade.plugins.any_model.facts import TextFacts
from saccade.plugins.any_model.refusals import Unservable

NAME = "saccade_counted"
OTHERWISE = 0
"""Denotes a mask that is not a window. No window has this size, because each token attends to
itself.
"""


def shown_mask(*, mask_function: Callable[..., torch.Tensor], config: Any, **_: Any) -> Any:
    """Return the number of tokens that the last token of the longest text attends to, [1, 1, 1, 1].

    transformers passes the result to the layers instead of a mask. It is `OTHERWISE` for a mask
    that is not a window.
    """
    context = config.max_position_embeddings
    nothing, places = torch.zeros((1, 1), dtype=torch.int64), torch.arange(context)[None]
    last = torch.tensor([[context - 2], [context - 1]])
    try:
        seen = mask_function(nothing, nothing, last, places).expand(2, context)
    except (IndexError, RuntimeError):  # the mask depends on properties of tokens
        return torch.full((1, 1, 1, 1), OTHERWISE)
    count = int(seen[1].sum())
    window = (places <= last) & (places > last - count)
    return torch.full((1, 1, 1, 1), count if torch.equal(seen, window) else OTHERWISE)


def counted_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    paged: PagedCall | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Call `paged_attention` with a `PromptAttention`, and record which window the layer's mask
    has.
    """
    made = paged_attention(module, query, key, value, None, paged=paged, **more)
    assert paged is not None and isinstance(paged.attention, PromptAttention)
    sees = None if attention_mask is None else int(attention_mask.flatten()[0])
    paged.attention.sees.append(sees)
    return made


AttentionInterface.register(NAME, counted_attention)
AttentionMaskInterface.register(NAME, shown_mask)


class PromptAttention:
    """Computes attention over one whole prompt without pages, and records its calls.

    Implements `nn.protocol.Attention`.
    """

    def __init__(self, text: TextFacts) -> None:
        self.layers: list[tuple[int, int]] = []  # the layer and number of heads of each call
        # the mask of each call, in the form of `shown_mask`, or None if it has no mask
        self.sees: list[int | None] = []
        self._text = text

    @property
    def recurrence(self) -> Recurrence:
        return NoRecurrence()

    def plan(self, batch: Batch) -> None: ...

    def __call__(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,  # noqa: ARG002 - the name is the protocol's
        qk_norm: QKNorm | None,  # noqa: ARG002
        layer: int,
    ) -> torch.Tensor:
        self.layers.append((layer, qkv.shape[1]))
        heads, kv_heads = self._text.heads, self._text.kv_heads
        if qkv.shape[1] != heads + 2 * kv_heads:
            raise Unservable(
                f"its layer {layer} calls attention with {qkv.shape[1]} heads in total; its "
                f"configuration has {heads} query heads, and {kv_heads} each for keys and values"
            )
        split = [heads, kv_heads, kv_heads]
        query, key, value = torch.split(qkv.transpose(0, 1), split)  # [H, T, D]
        key, value = (each.repeat_interleave(heads // kv_heads, dim=0) for each in (key, value))
        places = torch.arange(len(qkv), device=qkv.device)
        back = places[:, None] - places
        seen = back >= 0
        if self._text.windows and (window := self._text.windows[layer]) is not None:
            seen &= back < window
        return F.scaled_dot_product_attention(query, key, value, seen).transpose(0, 1).contiguous()

    def attend_cached(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("transformers' layers have keys and values of their own")

    over_latents = attend_cached


class NoRecurrence:
    """A recurrence that raises if it is called. Implements `nn.protocol.Recurrence`."""

    def __call__(self, inputs: DeltaInputs, layer: int) -> torch.Tensor:  # noqa: ARG002
        raise AssertionError("transformers' layers know no states of ours")

    def convolve(self, x: torch.Tensor, taps: torch.Tensor, layer: int) -> torch.Tensor:  # noqa: ARG002
        raise AssertionError("transformers' layers know no states of ours")


def counted_token(
    text: TextFacts, run: Callable[[torch.Tensor, torch.Tensor, PagedCall], torch.Tensor], x: Any
) -> torch.Tensor:
    """Pass one token's embedding x [1, hidden] through all layers, and return its state [1,
    hidden].

    The layers' attention must be `NAME`. Raises Unservable if a layer needs another KV cache.
    """
    counted = PromptAttention(text)
    positions = torch.zeros((text.axes, 1), dtype=torch.int64, device=x.device)
    state = run(x, positions, PagedCall(counted, text.head_dim, 1, x.device))
    wanted = [(layer, text.heads + 2 * text.kv_heads) for layer in range(text.layers)]
    if not counted.layers:
        raise Unservable(
            "its layers do not use transformers' attention interface, so their keys and values "
            "cannot be cached in pages"
        )
    if counted.layers != wanted:
        raise Unservable(
            f"its layers call attention as {counted.layers} (layer, heads) instead of once each "
            f"as {wanted}: their state does not fit into pages"
        )
    windows = text.windows or (None,) * text.layers
    for layer, (sees, window) in enumerate(zip(counted.sees, windows, strict=True)):
        if (sees or text.context_length) != (window or text.context_length) or sees == OTHERWISE:
            seen = (
                f"the last {sees} tokens"
                if sees
                else ("tokens by a rule that no KV cache supports")
            )
            raise Unservable(
                f"its layer {layer} attends to {seen}; its configuration specifies "
                f"{window or 'all tokens'}"
            )
    return state
