"""What x86 processors run in bfloat16 by machine code of our own; all else by PyTorch. Imported
where Numba is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.kernels.matrix import DenseMatrix, Matrix
from saccade.kernels.reference import activation as activations
from saccade.kernels.reference import layer, linear, norm, patchify, rotary
from saccade.kernels.reference.activation import SLOPE, Activation
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.moe import Addresses, Experts, Routes, sort_visits
from saccade.kernels.reference.ops import Ops, Recorded, Work
from saccade.kernels.reference.paged import PagedCache
from saccade.kernels.reference.rotary import Rotation
from saccade.kernels.x86.delta import (
    SequentialRows,
    compiled_conv,
    compiled_delta,
    compiled_delta_gates,
    compiled_gated_rms_norm,
)
from saccade.kernels.x86.dense import lay_out, lays_out
from saccade.kernels.x86.draw import compiled_draw
from saccade.kernels.x86.layer import (
    compiled_centre,
    compiled_gate_heads,
    compiled_layer_norm,
    compiled_rms_norm,
    compiled_sigmoid_gate,
    compiled_silu_gate,
    compiled_turn,
    compiled_turn_and_cache,
)
from saccade.kernels.x86.moe import compiled_experts, locate
from saccade.kernels.x86.recording import NotRecorded, Recording

FEW_ROWS = 32
"""So many rows and fewer read experts' matrices faster than they multiply them."""
HALF = torch.bfloat16
WEIGHTS = HALF, torch.float32
"""Of norms: where a checkpoint holds them minus 1, they are kept in float32."""
SIGMOIDS: dict[Activation, tuple[float, float]] = {
    "gelu_tanh": (SLOPE, 0.044715 * SLOPE),
    "quick_gelu": (1.702, 0.0),
}
"""Activations x * sigmoid(a x + b x^3): PyTorch makes several passes of each."""


def _plain(*tensors: torch.Tensor) -> bool:
    return all(each.dtype == HALF and each.is_contiguous() for each in tensors)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation in SIGMOIDS and _plain(x):
        return compiled_sigmoid_gate(x, *SIGMOIDS[activation])
    return activations.activate(x, activation)


def centre_patches(
    frames: torch.Tensor, patch: int, merge: int, dtype: torch.dtype
) -> torch.Tensor:
    if dtype == HALF and frames.is_contiguous() and frames.shape[3] == 3:
        return compiled_centre(frames, patch, merge)
    return patchify.centre_patches(frames, patch, merge, dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    if _plain(x, weight, bias):
        return compiled_layer_norm(x, None, weight, bias, eps)[1]
    return norm.layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if _plain(x, delta, weight, bias):
        return compiled_layer_norm(x, delta, weight, bias, eps)
    return layer.add_layer_norm(x, delta, weight, bias, eps)


def rotate_(rotation: Rotation, x: torch.Tensor) -> None:
    together = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    if x.dtype == HALF and rotation.pairs == "halves" and together:
        compiled_turn(rotation, x)
    else:
        rotary.rotate_(rotation, x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == HALF and weight.dtype in WEIGHTS and weight.dim() == 1 and x.is_contiguous():
        return compiled_rms_norm(x, None, weight, eps)[1]
    return norm.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dtype == delta.dtype == HALF and weight.dtype in WEIGHTS:
        return compiled_rms_norm(x, delta, weight, eps)
    return layer.add_rms_norm(x, delta, weight, eps)


def gate(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    if act == "silu" and gate_up.dtype == HALF:
        return compiled_silu_gate(gate_up)
    return layer.gate(gate_up, act)


def turn_and_cache(
    qkv: torch.Tensor,
    kv_heads: int,
    rotation: Rotation,
    qk_norm: QKNorm | None,
    cache: PagedCache,
    out_slots: torch.Tensor,
) -> torch.Tensor:
    weight = qkv if qk_norm is None else qk_norm.weight
    if not (cache.keys.dtype == qkv.dtype == HALF and weight.dtype in WEIGHTS):
        return layer.turn_and_cache(qkv, kv_heads, rotation, qk_norm, cache, out_slots)
    ready, across = rotation.ready(), rotation.pairs == "halves"
    return compiled_turn_and_cache(
        qkv, kv_heads, ready.cos, ready.sin, qk_norm, cache, out_slots, across=across
    )


def lay_out_dense(matrix: DenseMatrix) -> Matrix:
    if lays_out(matrix.values):
        return lay_out(matrix)
    return linear.lay_out_dense(matrix)


class X86Ops(Ops):
    """Machine code of our own, for bfloat16 alone.

    What has another dtype, as some norms' weights and an 8-bit cache, is PyTorch's.
    """

    kind = "x86"
    compiles = "decode"
    sequential_states = True

    lay_out_dense = staticmethod(lay_out_dense)
    activate = staticmethod(activate)
    centre_patches = staticmethod(centre_patches)
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    rotate_ = staticmethod(rotate_)
    add_rms_norm = staticmethod(add_rms_norm)
    add_layer_norm = staticmethod(add_layer_norm)
    gate = staticmethod(gate)
    gate_heads = staticmethod(compiled_gate_heads)
    gated_rms_norm = staticmethod(compiled_gated_rms_norm)
    turn_and_cache = staticmethod(turn_and_cache)
    state_rows = staticmethod(SequentialRows.of)
    delta_gates = staticmethod(compiled_delta_gates)
    causal_conv = staticmethod(compiled_conv)
    gated_delta = staticmethod(compiled_delta)
    draw_few = staticmethod(compiled_draw)

    def record(self, work: Work, /) -> Recorded | None:
        try:
            return Recording(work)
        except NotRecorded:
            return None

    def locate(self, up: Sequence[Matrix], down: Sequence[Matrix], /) -> Addresses | None:
        return locate(up, down)

    def expert_mlp(
        self, x: torch.Tensor, routes: Routes, experts: Experts, act: Activation, first: int = 0
    ) -> torch.Tensor:
        if experts.places is None or len(x) > FEW_ROWS or act != "silu":
            return super().expert_mlp(x, routes, experts, act, first)
        visits = sort_visits(routes, first, len(experts.up))
        return compiled_experts(x, routes.shares, visits.order, visits.runs, experts.places)
