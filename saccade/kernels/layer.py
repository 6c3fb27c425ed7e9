"""What stands between the products of a layer of the language model, each in one pass: queries and
keys normalised, turned and cached; a stream added to and normalised; a gate applied.

Owns what each means in plain PyTorch, which CPUs run. On a GPU each is one launch of
`triton/layer.py`; in bfloat16 on a CPU, of `x86/layer.py`, where that can be compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from saccade.kernels import device
from saccade.kernels.fp8 import FEW_ROWS, Rows, put_rows, quantise_rows
from saccade.kernels.linear import Activation, activate
from saccade.kernels.norm import rms_norm
from saccade.kernels.paged import PagedCache
from saccade.kernels.rotary import Rotation, rotate_


class QKNorm(NamedTuple):
    """RMS norm of queries and keys: weights [Hq + Hkv, D], of heads of queries, then keys."""

    weight: torch.Tensor
    eps: float


def turn_and_cache(
    qkv: torch.Tensor,
    kv_heads: int,
    rotation: Rotation,
    qk_norm: QKNorm | None,
    cache: PagedCache,
    out_slots: torch.Tensor,
) -> torch.Tensor:  # [T, Hq, D]
    """Queries, ready for attention; keys and values go to kv slots `out_slots` [T] of the cache,
    in its dtype.

    qkv [T, Hq + 2 Hkv, D]: heads of queries, of keys, of values; it may be changed. Queries and
    keys are normalised before they are turned.
    """
    if device.runs_triton(qkv):
        # Imported where there is a GPU: elsewhere Triton need not be installed.
        from saccade.kernels.triton.layer import launch_turn_and_cache

        ready = rotation.ready()
        halves = rotation.pairs == "halves"
        return launch_turn_and_cache(
            qkv, kv_heads, ready.cos, ready.sin, qk_norm, cache, out_slots, halves=halves
        )
    if _compiles(qkv, cache, qk_norm):
        # Imported where it runs: elsewhere Numba need not be installed.
        from saccade.kernels.x86.layer import compiled_turn_and_cache

        ready = rotation.ready()
        across = rotation.pairs == "halves"
        return compiled_turn_and_cache(
            qkv, kv_heads, ready.cos, ready.sin, qk_norm, cache, out_slots, across=across
        )
    rotated = qkv.shape[1] - kv_heads
    heads = rotated - kv_heads
    qk = qkv[:, :rotated]
    if qk_norm is not None:
        qk = rms_norm(qk, *qk_norm)
    rotate_(rotation, qk)
    put_rows(cache.keys, out_slots, qk[:, heads:], cache.key_scale)
    put_rows(cache.values, out_slots, qkv[:, rotated:], cache.value_scale)
    return qk[:, :heads]


def _compiles(qkv: torch.Tensor, cache: PagedCache, qk_norm: QKNorm | None) -> bool:
    """Whether all are in the one format that `x86/layer.py` knows."""
    weight = qkv if qk_norm is None else qk_norm.weight
    return device.runs_jit(qkv) and cache.keys.dtype == qkv.dtype == weight.dtype


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its RMS norm), both [T, hidden]."""
    if device.runs_triton(x):
        from saccade.kernels.triton.layer import launch_add_norm

        return launch_add_norm(x, delta, weight, None, eps)
    if device.runs_jit(x) and x.dtype == delta.dtype == weight.dtype:
        from saccade.kernels.x86.layer import compiled_rms_norm

        return compiled_rms_norm(x, delta, weight, eps)
    total = x + delta
    return total, rms_norm(total, weight, eps)


def add_rms_norm_rows(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[torch.Tensor, Rows]:
    """`add_rms_norm` for a product that takes many rows in 8 bits, of which `group` inputs share a
    scale (`linear.wanted_group`; 0: it takes none): the norm of so many is.
    """
    if not group or len(x) <= FEW_ROWS:
        return add_rms_norm(x, delta, weight, eps)
    if device.runs_triton(x):
        from saccade.kernels.triton.scaled import launch_add_norm_scaled

        return launch_add_norm_scaled(x, delta, weight, eps, group)
    total = x + delta
    return total, quantise_rows(rms_norm(total, weight, eps), group)


def add_layer_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its layer norm), both [T, hidden]."""
    if device.runs_triton(x):
        from saccade.kernels.triton.layer import launch_add_norm

        return launch_add_norm(x, delta, weight, bias, eps)
    total = x + delta
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)


def gate(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(gate) * up of gate_up [T, 2 I]: the gate's values, then up's. [T, I]"""
    if act == "silu" and device.runs_triton(gate_up):
        from saccade.kernels.triton.layer import launch_silu_gate

        return launch_silu_gate(gate_up)
    if act == "silu" and device.runs_jit(gate_up):
        from saccade.kernels.x86.layer import compiled_silu_gate

        return compiled_silu_gate(gate_up)
    left, right = gate_up.chunk(2, dim=-1)
    return activate(left, act) * right


def gate_rows(gate_up: torch.Tensor, act: Activation, group: int) -> Rows:
    """`gate` for such a product."""
    if not group or len(gate_up) <= FEW_ROWS:
        return gate(gate_up, act)
    if act == "silu" and device.runs_triton(gate_up):
        from saccade.kernels.triton.scaled import launch_silu_gate_scaled

        return launch_silu_gate_scaled(gate_up, group)
    return quantise_rows(gate(gate_up, act), group)
