"""The operations that run as Triton kernels on GPUs. Imported only if Triton is installed."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import Fp8Rows, Matrix
from saccade.kernels.reference import activation as activations
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.delta import StateRows
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.mask import mask_logits_there
from saccade.kernels.reference.norm import whole_rms_norm
from saccade.kernels.reference.ops import Compile, Ops
from saccade.kernels.reference.paged import PagedCache
from saccade.kernels.reference.rotary import Rotation
from saccade.plugins.gpu.tower_attention import TOWERS
from saccade.plugins.gpu.triton.activation import GATES
from saccade.plugins.gpu.triton.compilation import compile_abreast
from saccade.plugins.gpu.triton.delta import launch_conv, launch_delta
from saccade.plugins.gpu.triton.experts import launch_experts, launch_route
from saccade.plugins.gpu.triton.fp8 import launch_fp8
from saccade.plugins.gpu.triton.int4 import launch_int4
from saccade.plugins.gpu.triton.language_attention import ATTENTION
from saccade.plugins.gpu.triton.layer import (
    launch_add_norm,
    launch_gate,
    launch_rope_and_cache,
)
from saccade.plugins.gpu.triton.low_rank import launch_low_rank
from saccade.plugins.gpu.triton.rotary import launch as launch_rotary
from saccade.plugins.gpu.triton.sample import sample
from saccade.plugins.gpu.triton.scaled import (
    launch_add_norm_scaled,
    launch_quantise,
    launch_silu_gate_scaled,
)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return F.softplus(x)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return activations.activate(x, activation)


def dense_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
) -> torch.Tensor:
    if activation == "gelu_tanh" and bias is not None and x.is_cuda and x.dim() == 2:
        # cuBLASLt adds the bias and applies GELU in the matmul, so that its result is neither
        # rounded nor stored before. On a CPU this would be the exact GELU.
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return activate(F.linear(x, weight, bias), activation)


def as_it_is(matrix: Matrix) -> Matrix:
    return matrix


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_add_norm(x, delta, weight, None, eps)


def gate(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    if act in GATES:
        return launch_gate(gate_up, act)
    left, right = gate_up.chunk(2, dim=-1)
    return activate(left, act) * right


def rotate_(rotation: Rotation, x: torch.Tensor) -> None:
    halves = rotation.pairs == "halves"
    launch_rotary(x, rotation.cos, rotation.sin, rotation.index, rotation.axis, halves=halves)


def rope_and_cache(
    qkv: torch.Tensor,
    kv_heads: int,
    rotation: Rotation,
    qk_norm: QKNorm | None,
    cache: PagedCache,
    out_slots: torch.Tensor,
) -> torch.Tensor:
    ready, halves = rotation.ready(), rotation.pairs == "halves"
    return launch_rope_and_cache(
        qkv, kv_heads, ready.cos, ready.sin, qk_norm, cache, out_slots, halves=halves
    )


class TritonOps(Ops):
    """Operations that run as Triton kernels. They never wait for the device on the host, nor read a
    tensor there.
    """

    name = "Triton"
    attention = ATTENTION
    towers = TOWERS
    stacks = True
    looks_up = True
    prepare: str | None = "saccade.plugins.gpu.cuda.warm:prepare"
    slot_edits = "saccade.plugins.gpu.slot_edits:SlotEdits"

    @property
    def takes_int4(self) -> bool:
        return True

    def compiler(self, device: torch.device, ranks: int, /) -> Compile | None:
        return partial(compile_abreast, device=device, ranks=ranks)

    activate = staticmethod(activate)
    prepack_dense = staticmethod(as_it_is)
    prepack_int4 = staticmethod(as_it_is)
    dense_linear = staticmethod(dense_linear)
    int4_linear = staticmethod(launch_int4)
    few_fp8_linear = staticmethod(launch_fp8)
    quantise_rows = staticmethod(launch_quantise)
    add_low_rank = staticmethod(launch_low_rank)
    rms_norm = staticmethod(whole_rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    add_rms_norm_many = staticmethod(launch_add_norm_scaled)
    add_layer_norm = staticmethod(launch_add_norm)
    gate = staticmethod(gate)
    rotate_ = staticmethod(rotate_)
    rope_and_cache = staticmethod(rope_and_cache)
    state_rows = staticmethod(StateRows)
    softplus = staticmethod(softplus)
    causal_conv = staticmethod(launch_conv)
    gated_delta = staticmethod(launch_delta)
    route = staticmethod(launch_route)
    stacked_mlp = staticmethod(launch_experts)
    sample = staticmethod(sample)
    mask_logits = staticmethod(mask_logits_there)

    def gate_many(self, gate_up: torch.Tensor, act: Activation, group: int) -> Fp8Rows:
        if act == "silu":
            return launch_silu_gate_scaled(gate_up, group)
        return super().gate_many(gate_up, act, group)
