"""Fused layer operations in bfloat16 on CPUs. Each makes one pass over its input, and keeps
intermediate values in registers, where PyTorch would write them to memory.

Imported only if used (`ops.X86Ops`).
"""

from __future__ import annotations

from functools import cache

import torch

from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.paged import PagedCache
from saccade.kernels.reference.rotary import Rotation
from saccade.plugins.cpu.kernel import Kernel, bits
from saccade.plugins.cpu.numba_call import GATE_VALUES


@cache
def _rope_and_cache(dim: int, turned: int, across: bool, norm_bits: int) -> Kernel:
    return Kernel("layer_code", "rope_and_cache", dim, turned, across, norm_bits)


def compiled_rope_and_cache(
    qkv: torch.Tensor,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qk_norm: QKNorm | None,
    cache: PagedCache,
    out_slots: torch.Tensor,
    *,
    across: bool,
) -> torch.Tensor:
    """Compute `reference.layer.rope_and_cache`.

    cos, sin: float32 [T, R], from `Rotation.ready`.
    across: rotate pairs (i, i + R / 2) instead of (2 i, 2 i + 1).
    """
    tokens, all_heads, dim = qkv.shape
    heads = all_heads - 2 * kv_heads
    keys, values = cache.keys, cache.values
    assert qkv.stride(2) == 1 and qkv.stride(1) == dim, "a token's heads are contiguous"
    assert keys.is_contiguous() and values.is_contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    weight, eps = qk_norm or (None, 0.0)
    assert weight is None or weight.is_contiguous()
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype)
    _rope_and_cache(dim, cos.shape[1], across, 0 if weight is None else _bits_of(weight))(
        tokens,
        qkv.numel(),
        qkv.data_ptr(),
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out_slots.data_ptr(),
        heads,
        kv_heads,
        qkv.stride(0),
        bits(eps),
    )
    return q


def _bits_of(weight: torch.Tensor) -> int:
    return 8 * weight.itemsize


@cache
def _add_rms_norm(adds: bool, weight_bits: int) -> Kernel:
    return Kernel("layer_code", "add_rms_norm", adds, weight_bits)


def compiled_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.layer.add_rms_norm`. Without `delta`, return x and its norm."""
    kernel = _add_rms_norm(delta is not None, _bits_of(weight))
    return _normed(kernel, x, delta, (weight,), eps)


def _normed(
    kernel: Kernel,
    x: torch.Tensor,
    delta: torch.Tensor | None,
    parameters: tuple[torch.Tensor, ...],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta, and its norm.

    parameters: the norm's weight, and its bias if it has one.
    """
    assert x.is_contiguous() and all(parameter.is_contiguous() for parameter in parameters)
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    size = x.shape[-1]
    kernel(
        x.numel() // size,
        x.numel(),
        x.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        *(each.data_ptr() for each in parameters),
        total.data_ptr(),
        normed.data_ptr(),
        size,
        bits(eps),
    )
    return total, normed


@cache
def _rope() -> Kernel:
    return Kernel("layer_code", "rope")


def compiled_rope(rotation: Rotation, x: torch.Tensor) -> None:
    """Compute `reference.rotary.rotate_`, for pairs (i, i + R / 2) in bfloat16."""
    ready = rotation.ready()
    cos, sin = ready.cos.contiguous(), ready.sin.contiguous()
    tokens, heads, dim = x.shape
    numbers = heads, x.stride(0), dim, cos.shape[1] // 2
    _rope()(tokens, x.numel(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *numbers)


@cache
def _layer_norm(adds: bool) -> Kernel:
    return Kernel("layer_code", "layer_norm", adds)


def compiled_layer_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.layer.add_layer_norm`. Without `delta`, return x and its norm."""
    return _normed(_layer_norm(delta is not None), x, delta, (weight, bias), eps)


@cache
def _sigmoid_gate() -> Kernel:
    return Kernel("layer_code", "sigmoid_gate", GATE_VALUES)


def compiled_sigmoid_gate(x: torch.Tensor, first: float, third: float) -> torch.Tensor:
    """Compute `x * sigmoid(first * x + third * x^3)`."""
    assert x.is_contiguous()
    out, count = torch.empty_like(x), x.numel()
    numbers = x.data_ptr(), out.data_ptr(), count, bits(first), bits(third)
    _sigmoid_gate()(-(-count // GATE_VALUES), count, *numbers)
    return out


@cache
def _gate_heads() -> Kernel:
    return Kernel("layer_code", "gate_heads")


def compiled_gate_heads(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Compute `reference.layer.gate_heads`."""
    assert x.is_contiguous() and gates.stride()[1:] == x.stride()[1:]
    out, size = torch.empty_like(x), x[0].numel()
    numbers = x.data_ptr(), gates.data_ptr(), out.data_ptr(), size, gates.stride(0)
    _gate_heads()(len(x), x.numel(), *numbers)
    return out


@cache
def _gate() -> Kernel:
    return Kernel("layer_code", "gate", GATE_VALUES)


def compiled_silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `reference.layer.gate` with SiLU."""
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype)
    _gate()(rows * -(-size // GATE_VALUES), out.numel(), gate_up.data_ptr(), out.data_ptr(), size)
    return out


@cache
def _centre(patch: int) -> Kernel:
    return Kernel("layer_code", "centre", patch)


def compiled_centre(frames: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """Compute `reference.patchify.centre_patches` in bfloat16."""
    assert frames.is_contiguous() and frames.shape[3] == 3
    count, height, width, _ = frames.shape
    bands, across = height // (merge * patch), width // (merge * patch)
    rows = bands * across * merge**2
    out = torch.empty((rows, count * 3 * patch**2), dtype=torch.bfloat16)
    _centre(patch)(
        count * bands,
        out.numel(),
        frames.data_ptr(),
        out.data_ptr(),
        count,
        bands,
        across,
        merge,
    )
    return out
