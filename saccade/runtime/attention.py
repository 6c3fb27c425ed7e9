"""Chooses the language model's attention backend, and implements `nn.protocol.Attention` with it
for the paged KV cache.

`kernels/language_attention.py` lists the backends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from saccade.core.errors import ConfigError
from saccade.core.family import AttentionShape, KVSpec
from saccade.kernels.language_attention import possible
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.paged import (
    AttentionBackend,
    PagedCache,
    PagedRows,
    PagedShape,
    plain_shape,
)
from saccade.kernels.reference.rotary import Rotation
from saccade.nn.protocol import Batch

if TYPE_CHECKING:
    from saccade.runtime.states import StateLayers, StateRecurrence

KVCache = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""(keys, values) by layer, for layers that cache them. Each is [KV slots, KV heads, head dim], and
the index of a KV slot is page * page_size + offset in the page.
"""


KVScales = Sequence[tuple[float, float]]
"""For each layer, the scales of keys and values in an 8-bit cache. Values are divided by their
scale when they are stored.
"""
NO_STATES: StateLayers = {}


def pick_attention(
    wanted: str,
    ops: Ops,
    place: torch.device,
    dtype: torch.dtype,
    *,
    graphs: bool = False,
    shapes: Collection[AttentionShape] = (),
) -> str:
    """Return the name of the attention backend to use. For "auto", this is the first one that
    supports the device.

    Raises ConfigError if the requested backend is not supported. The message lists those that are.

    graphs: True if steps will be captured as CUDA graphs.
    shapes: the attention shapes of the model's layers.
    """
    table = ops.attention
    runs = possible(table, place, dtype, graphs=graphs)
    names = possible(table, place, dtype, graphs=graphs, shapes=shapes)
    shown = f"{place.type} in {str(dtype).removeprefix('torch.')}"
    if not names:
        why = table[runs[0]].lacks(shapes)
        raise ConfigError(f"{why} on {shown}: start the server with --device cpu")
    if wanted == "auto":
        return names[0]
    if wanted in names:
        return wanted
    why, other = f"it does not run on {shown}", table.get(wanted)
    if other is not None and not other.installed:
        why = f"{other.package} is not installed ({other.install})"
    elif other is not None and wanted in runs:
        why = other.lacks(shapes)
    elif wanted in possible(table, place, dtype):
        why = "its steps cannot be captured in CUDA graphs: add --disable-cuda-graph"
    raise ConfigError(
        f"--attention-backend {wanted}: {why}; available are auto, {', '.join(names)}"
    )


def attention_for(
    kv: KVCache,
    page_size: int,
    states: StateLayers = NO_STATES,
    *,
    dtype: torch.dtype | None = None,
    scales: KVScales = (),
    backend: str = "auto",
    graphs: bool = False,
    ops: Ops | None = None,
    kept: KVSpec | None = None,
) -> PagedAttention:
    """Create the attention with the named backend, on the device of the KV cache.

    Raises ConfigError.

    states: the states of layers with linear attention.
    dtype: the dtype of the queries. The default is that of the cache.
    scales: the scales of an 8-bit cache, (keys, values) for each layer. If empty, all scales are 1.
    graphs: True if steps will be captured, so that lengths and pages must be read on the device.
    ops: the operations to use. The default is those of the device.
    kept: has the attention shapes of the layers. By default, all layers are causal.
    """
    each = scales or [(1.0, 1.0)] * len(kv)
    shapes = kept.attention if kept else {layer: plain_shape(*pair) for layer, pair in kv.items()}
    caches = {
        layer: PagedCache(*kv[layer], *scale, shape=shapes[layer])
        for layer, scale in zip(kv, each, strict=True)
    }
    # of any layer, since all have the same dtype and device
    keys = next(iter(caches.values())).keys
    place, dtype = keys.device, dtype or keys.dtype
    ops = ops or pick_ops(place, dtype)
    name = pick_attention(backend, ops, place, dtype, graphs=graphs, shapes=shapes.values())
    chosen = ops.attention[name]
    if not chosen.kept and keys.dtype != dtype:
        raise ConfigError(
            f"--attention-backend {name}: it does not support an 8-bit cache; use --kv-cache-dtype "
            "auto"
        )
    made: dict[tuple[int, ...], AttentionBackend] = {}
    steady = not states or ops.sequential_states
    for cache in caches.values():
        heads, dim = cache.keys.shape[1:]
        if (heads, dim) not in made:
            shape = PagedShape(heads, dim, page_size, keys.dtype, dtype)
            made[heads, dim] = chosen.make(shape)
            steady &= chosen.steady(shape)
    backends = {layer: made[cache.keys.shape[1:]] for layer, cache in caches.items()}
    return PagedAttention(caches, page_size, backends, ops, states, steady=steady)


class PagedAttention:
    """Writes the keys and values of each layer to its cache, and attends with the layer's
    backend.
    """

    def __init__(
        self,
        caches: Mapping[int, PagedCache],
        page_size: int,
        backends: Mapping[int, AttentionBackend],
        ops: Ops,
        states: StateLayers = NO_STATES,
        *,
        steady: bool = False,
    ) -> None:
        """Create the attention. Layers with equal numbers and sizes of heads share one backend.

        steady: True if decode steps of the same size make the same calls, so that these can be
            captured. It must hold for all layers.
        """
        self._recurrence: StateRecurrence | None = None
        if states:
            from saccade.runtime.states import StateRecurrence

            self._recurrence = StateRecurrence(states, ops)
        self._caches = caches
        self._page_size = page_size
        self._backends = backends
        self._each = tuple({id(backend): backend for backend in backends.values()}.values())
        self._ops = ops
        self._whole_images = any(cache.shape.both_ways for cache in caches.values())
        self._out_slots = torch.empty(0, dtype=torch.int64)
        windows = [cache.shape.window for cache in caches.values()]
        self._reach = min((each for each in windows if each is not None), default=None)
        self.steady = steady

    @property
    def recurrence(self) -> StateRecurrence:
        assert self._recurrence is not None, "no layer keeps states"
        return self._recurrence

    def repeats(self, batch: Batch) -> bool:
        """Return True if a captured step of this size can be replayed for this batch.

        Each row must have one token, and all such batches must make the same calls, which read the
        rows' lengths and pages from memory that `plan` fills.
        """
        single = len(batch.tokens) == len(batch.slots)
        if not (self.steady and single) or len(batch.splice_rows) or batch.kept:
            return False
        return self._reach is None or int(batch.kv_lengths.max()) <= self._reach

    def plan(self, batch: Batch) -> None:
        if self._recurrence is not None:
            self._recurrence.plan(batch)
        self._out_slots = batch.out_slots
        rows = PagedRows(
            batch.q_starts,
            batch.kv_lengths,
            batch.slots,
            batch.page_table,
            self._page_size,
            batch.singles,
            sees=keys_seen(batch) if self._whole_images and len(batch.splice_rows) else None,
        )
        for backend in self._each:
            backend.plan(rows)

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QKNorm | None, layer: int
    ) -> torch.Tensor:
        cache = self._caches[layer]
        heads = cache.keys.shape[1]
        q = self._ops.rope_and_cache(qkv, heads, rotation, qk_norm, cache, self._out_slots)
        return self._backends[layer](q, cache)

    def attend_cached(
        self, q: torch.Tensor, rotation: Rotation, q_norm: QKNorm, layer: int
    ) -> torch.Tensor:
        q = self._ops.rms_norm(q, *q_norm)
        self._ops.rotate_(rotation, q)
        return self._backends[layer](q, self._caches[layer])

    def over_latents(self, q: torch.Tensor, latents: torch.Tensor, layer: int) -> torch.Tensor:
        """Write `latents` to the layer's cache, and return the attention of all query heads to the
        cache.

        The cached latents serve as a single head of both keys and values (MLA).
        """
        cache = self._caches[layer]
        cache.keys.index_copy_(0, self._out_slots, latents.unsqueeze(1))
        return self._backends[layer](q, cache)


def keys_seen(batch: Batch) -> torch.Tensor:  # [T] int64
    """Return how many keys of its sequence each token attends to, [T], if image tokens attend to
    each other.

    A text token attends to all keys up to its own. An image token attends to all keys up to the
    last consecutive image token.
    """
    count, starts = len(batch.tokens), batch.q_starts.long()
    at = torch.arange(count, device=starts.device)
    row = torch.searchsorted(starts[1:], at, right=True)
    own = batch.kv_lengths.long()[row] - starts[row + 1] + at + 1
    image = torch.zeros(count, dtype=torch.bool, device=at.device)
    image.index_fill_(0, batch.splice_rows, True)  # index_fill_ copies no value from the host
    goes_on = torch.zeros_like(image)
    goes_on[:-1] = image[1:] & (row[1:] == row[:-1])
    ends = torch.where(goes_on & image, count, at)  # an image's last token, or the token itself
    ends = ends.flip(0).cummin(0).values.flip(0)
    return torch.where(image, own[ends], own)
