"""Operations for x86 CPUs in bfloat16: compiled kernels where there are any, otherwise PyTorch.
Imported only if Numba is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from saccade.kernels.matrix import DenseMatrix, Matrix
from saccade.kernels.reference import activation as activations
from saccade.kernels.reference import layer, linear, norm, patchify, rotary
from saccade.kernels.reference.activation import SLOPE, Activation
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.long_attention import MIN_KEYS, MIN_QUERIES, pays
from saccade.kernels.reference.ops import Captured, LazyModule, Work, later
from saccade.kernels.reference.paged import PagedCache
from saccade.kernels.reference.rotary import Rotation
from saccade.kernels.reference.segments import TowerAttention
from saccade.plugins.cpu.attention import attend_segments, softmax
from saccade.plugins.cpu.dense import can_prepack, prepack
from saccade.plugins.cpu.language_attention import ATTENTION
from saccade.plugins.cpu.layer import (
    compiled_centre,
    compiled_gate_heads,
    compiled_layer_norm,
    compiled_rms_norm,
    compiled_rope,
    compiled_rope_and_cache,
    compiled_sigmoid_gate,
    compiled_silu_gate,
)
from saccade.plugins.cpu.precompile import start_background
from saccade.plugins.cpu.quantized_ops import QuantizedOps
from saccade.plugins.cpu.sample import compiled_sample

if TYPE_CHECKING:
    from saccade.kernels.reference.moe import Addresses, Experts, Routes
    from saccade.plugins.cpu import delta, moe
else:
    delta = LazyModule("saccade.plugins.cpu.delta")
    moe = LazyModule("saccade.plugins.cpu.moe")

MAX_SMALL_BATCH = 32
"""Maximum batch size for `moe.compiled_experts`. For larger ones, a GEMM per expert is faster."""
BF16 = torch.bfloat16
WEIGHTS = BF16, torch.float32
"""Dtypes of norm weights. Weights that a checkpoint stores minus 1 are kept in float32."""
SIGMOIDS: dict[Activation, tuple[float, float]] = {
    "gelu_tanh": (SLOPE, 0.044715 * SLOPE),
    "quick_gelu": (1.702, 0.0),
}
"""(a, b) of activations x * sigmoid(a x + b x^3), which take PyTorch several passes."""


def _plain(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype == BF16 and tensor.is_contiguous() for tensor in tensors)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation in SIGMOIDS and _plain(x):
        return compiled_sigmoid_gate(x, *SIGMOIDS[activation])
    return activations.activate(x, activation)


def centre_patches(
    frames: torch.Tensor, patch: int, merge: int, dtype: torch.dtype
) -> torch.Tensor:
    if dtype == BF16 and frames.is_contiguous() and frames.shape[3] == 3:
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
    if x.dtype == BF16 and rotation.pairs == "halves" and together:
        compiled_rope(rotation, x)
    else:
        rotary.rotate_(rotation, x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == BF16 and weight.dtype in WEIGHTS and weight.dim() == 1 and x.is_contiguous():
        return compiled_rms_norm(x, None, weight, eps)[1]
    return norm.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dtype == delta.dtype == BF16 and weight.dtype in WEIGHTS:
        return compiled_rms_norm(x, delta, weight, eps)
    return layer.add_rms_norm(x, delta, weight, eps)


def gate(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    if act == "silu" and gate_up.dtype == BF16:
        return compiled_silu_gate(gate_up)
    return layer.gate(gate_up, act)


def rope_and_cache(
    qkv: torch.Tensor,
    kv_heads: int,
    rotation: Rotation,
    qk_norm: QKNorm | None,
    cache: PagedCache,
    out_slots: torch.Tensor,
) -> torch.Tensor:
    weight = qkv if qk_norm is None else qk_norm.weight
    if not (cache.keys.dtype == qkv.dtype == BF16 and weight.dtype in WEIGHTS):
        return layer.rope_and_cache(qkv, kv_heads, rotation, qk_norm, cache, out_slots)
    ready, across = rotation.ready(), rotation.pairs == "halves"
    return compiled_rope_and_cache(
        qkv, kv_heads, ready.cos, ready.sin, qk_norm, cache, out_slots, across=across
    )


def prepack_dense(matrix: DenseMatrix) -> Matrix:
    if can_prepack(matrix.values):
        return prepack(matrix)
    return linear.prepack_dense(matrix)


TOWERS: Mapping[str, TowerAttention] = {"sdpa": attend_segments}


class X86Ops(QuantizedOps):
    """Compiled operations for bfloat16.

    For tensors of other dtypes, such as an 8-bit KV cache, these call PyTorch.
    """

    name = "x86"
    attention = ATTENTION
    towers = TOWERS
    folds_towers = True
    sequential_states = True
    prepare = "saccade.plugins.cpu.startup_info:prepare"

    def compile_in_background(self) -> Callable[[], None]:
        return start_background()

    def precompile(self, like: torch.Tensor, /) -> None:
        if pays(like, MIN_QUERIES, MIN_KEYS):
            softmax(torch.zeros(1, 1))

    prepack_dense = staticmethod(prepack_dense)
    activate = staticmethod(activate)
    centre_patches = staticmethod(centre_patches)
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    rotate_ = staticmethod(rotate_)
    add_rms_norm = staticmethod(add_rms_norm)
    add_layer_norm = staticmethod(add_layer_norm)
    gate = staticmethod(gate)
    gate_heads = staticmethod(compiled_gate_heads)
    rope_and_cache = staticmethod(rope_and_cache)
    # For models with recurrent states or experts only.
    gated_rms_norm = later(lambda: delta.compiled_gated_rms_norm)
    state_rows = later(lambda: delta.SequentialRows.of)
    delta_gates = later(lambda: delta.compiled_delta_gates)
    causal_conv = later(lambda: delta.compiled_conv)
    gated_delta = later(lambda: delta.compiled_delta)
    few_experts = later(lambda: moe.compiled_experts)
    sample = staticmethod(compiled_sample)

    def record(self, work: Work, /) -> Captured | None:
        from saccade.plugins.cpu.capture import CapturedWork, CaptureError

        try:
            return CapturedWork(work)
        except CaptureError:
            return None

    def locate(self, up: Sequence[Matrix], down: Sequence[Matrix], /) -> Addresses | None:
        from saccade.plugins.cpu.moe import locate

        return locate(up, down)

    def expert_mlp(
        self, x: torch.Tensor, routes: Routes, experts: Experts, act: Activation, first: int = 0
    ) -> torch.Tensor:
        if experts.places is None or len(x) > MAX_SMALL_BATCH or act != "silu":
            return super().expert_mlp(x, routes, experts, act, first)
        from saccade.kernels.reference.moe import sort_visits

        visits = sort_visits(routes, first, len(experts.up))
        return self.few_experts(x, routes.shares, visits.order, visits.runs, experts.places)
