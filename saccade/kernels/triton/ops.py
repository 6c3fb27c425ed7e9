"""What GPUs run by Triton's kernels; all else by PyTorch. Imported where Triton is installed."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from saccade.kernels.reference.activation import Activation, activate
from saccade.kernels.reference.delta import StateRows
from saccade.kernels.reference.experts import Stack
from saccade.kernels.reference.fp8 import Fp8Matrix, Fp8Rows
from saccade.kernels.reference.int4 import Int4Matrix
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.mask import mask_logits_there
from saccade.kernels.reference.norm import whole_rms_norm
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.paged import PagedCache
from saccade.kernels.reference.rotary import Rotation
from saccade.kernels.triton.delta import launch_conv, launch_delta
from saccade.kernels.triton.experts import launch_experts
from saccade.kernels.triton.fp8 import launch_fp8
from saccade.kernels.triton.int4 import launch_int4
from saccade.kernels.triton.layer import (
    launch_add_norm,
    launch_silu_gate,
    launch_turn_and_cache,
)
from saccade.kernels.triton.rotary import launch as launch_rotary
from saccade.kernels.triton.scaled import (
    launch_add_norm_scaled,
    launch_quantise,
    launch_silu_gate_scaled,
)


class TritonOps(Ops):
    """The host waits for nothing, and no tensor is read there."""

    kind = "triton"
    compiles = "everything"
    stacks = True
    samples = True
    looks_up = True

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        return activate(x, activation)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def ready_int4(self, weight: Int4Matrix) -> Int4Matrix:
        return weight

    def dense_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        return self.activate(F.linear(x, weight, bias), activation)

    def int4_linear(
        self, x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return launch_int4(x, matrix, bias)

    def fp8_few(
        self, x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return launch_fp8(x, matrix, bias)

    def quantise_rows(self, x: torch.Tensor, group: int) -> Fp8Rows:
        return launch_quantise(x, group)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return whole_rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return launch_add_norm(x, delta, weight, None, eps)

    def add_rms_norm_many(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
    ) -> tuple[torch.Tensor, Fp8Rows]:
        return launch_add_norm_scaled(x, delta, weight, eps, group)

    def add_layer_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return launch_add_norm(x, delta, weight, bias, eps)

    def gate(self, gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
        if act == "silu":
            return launch_silu_gate(gate_up)
        left, right = gate_up.chunk(2, dim=-1)
        return self.activate(left, act) * right

    def gate_many(self, gate_up: torch.Tensor, act: Activation, group: int) -> Fp8Rows:
        if act == "silu":
            return launch_silu_gate_scaled(gate_up, group)
        return super().gate_many(gate_up, act, group)

    def rotate_(self, rotation: Rotation, x: torch.Tensor) -> None:
        halves = rotation.pairs == "halves"
        launch_rotary(x, rotation.cos, rotation.sin, rotation.index, rotation.axis, halves=halves)

    def turn_and_cache(
        self,
        qkv: torch.Tensor,
        kv_heads: int,
        rotation: Rotation,
        qk_norm: QKNorm | None,
        cache: PagedCache,
        out_slots: torch.Tensor,
    ) -> torch.Tensor:
        ready, halves = rotation.ready(), rotation.pairs == "halves"
        return launch_turn_and_cache(
            qkv, kv_heads, ready.cos, ready.sin, qk_norm, cache, out_slots, halves=halves
        )

    def state_rows(
        self,
        q_starts: torch.Tensor,
        kv_lengths: torch.Tensor,
        lines: torch.Tensor,
        singles: int,
    ) -> StateRows:
        return StateRows(q_starts, kv_lengths, lines, singles)

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, rows: StateRows
    ) -> torch.Tensor:
        return launch_conv(x, weight, states, rows)

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        return launch_delta(q, k, v, decay, beta, states, rows)

    def stacked_mlp(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        shares: torch.Tensor,
        up: Stack,
        down: Stack,
        before: int = 0,
    ) -> torch.Tensor:
        return launch_experts(x, experts, shares, up, down, before)

    def mask_logits(
        self, logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        return mask_logits_there(logits, masks, rows)
